// Python beside the page: loads Pyodide and the planner from this site, then answers one request after the
// other. Started by workbench.js. The Python that answers is docs/tools/in_browser.py.
import { loadPyodide } from "../python/pyodide.mjs";

const folder = new URL("../python/", import.meta.url).href;

async function start() {
  const [python, planner] = await Promise.all([
    loadPyodide({ indexURL: folder }),
    fetch(`${folder}planner.zip`).then((response) => response.arrayBuffer()),
  ]);
  python.unpackArchive(planner, "zip");
  return python.pyimport("in_browser");
}

const started = start();

onmessage = async ({ data: { number, source, sizes } }) => {
  try {
    const inBrowser = await started;
    postMessage({ number, begun: true });
    postMessage({ number, answer: inBrowser.answer(source, ...sizes) });
  } catch (error) {
    postMessage({ number, failed: String(error.message ?? error) });
  }
};
