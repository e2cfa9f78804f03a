// Python beside the page: loads Pyodide and the planner from this site, telling how much is there, then
// answers one request after the other. Started by workbench.js. The Python that answers is docs/tools/player/in_browser.py.
//
//   in:   {sizes: {file name: bytes}} once, then {number, source, sizes: [p, M, v, G]}
//   out:  {loaded: bytes}, {starting: true}, {ready: true}; {number, begun: true}, {number, answer: JSON};
//         {failed: words}
import { loadPyodide } from "../python/pyodide.mjs";

const folder = new URL("../python/", import.meta.url).href;
const FETCHED = ["pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json", "planner.zip"];
const IMPORTED = ["pyodide.mjs", "pyodide.asm.mjs"]; // their bytes count when all of them are there
let inBrowser = null;

// A file as a response, read to its end; `count` is told of each piece. No length is asked of the server.
async function counted(name, count) {
  const response = await ordinaryFetch(folder + name);
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  const reader = response.body.getReader(), pieces = [];
  for (let next; !(next = await reader.read()).done; pieces.push(next.value)) count(next.value.length);
  // A server that does not know the type of WebAssembly gives another.
  return new Response(new Blob(pieces), { headers: { "content-type": name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream" } });
}

const ordinaryFetch = globalThis.fetch;

async function start(sizes) {
  let loaded = 0, told = 0;
  const count = (bytes) => {
    loaded += bytes;
    const now = performance.now();
    if (now - told < 80) return;
    told = now;
    postMessage({ loaded });
  };
  // Files that Python asks for are those that are on their way already.
  const files = new Map(FETCHED.map((name) => [folder + name, counted(name, count)]));
  globalThis.fetch = (url, ...options) => files.get(String(url)) ?? ordinaryFetch(url, ...options);
  await Promise.all([...files.values(), ...IMPORTED.map((name) => import(folder + name).then(() => count(sizes[name] ?? 0)))]);
  postMessage({ starting: true });
  const python = await loadPyodide({ indexURL: folder });
  const planner = await (await files.get(`${folder}planner.zip`)).arrayBuffer();
  globalThis.fetch = ordinaryFetch;
  python.unpackArchive(planner, "zip");
  inBrowser = python.pyimport("in_browser");
  postMessage({ ready: true });
}

onmessage = async ({ data: { number, source, sizes } }) => {
  try {
    if (number === undefined) return await start(sizes);
    postMessage({ number, begun: true });
    postMessage({ number, answer: inBrowser.answer(source, ...sizes) });
  } catch (error) {
    postMessage({ failed: String(error.message ?? error) });
  }
};
