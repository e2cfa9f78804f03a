"""The replay's view of combined 1F1B: pairs, and a lane of all-to-alls. In node, without a browser."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minimegatron.tracing.html import page_data
from minimegatron.tracing.trace_view import Trace
from tests.trace.test_combined_recording import M, recorded  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

from player import plan_words  # noqa: E402
from records import traces as record_traces  # noqa: E402

PROGRAM = """
globalThis.MM = { say: (name, facts) => name + JSON.stringify(facts ?? {}) };
require(process.argv[1]);
const { data, kinds } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const scene = new MM.RecordedScene(data, data.steps[0], kinds);
const [compute, exchanges] = scene.tracks({})[0].lanes;
const pair = scene.find("0:F1&B0");
const near = (which) => scene[which](0, pair.event).map(({ event }) => event.id);
process.stdout.write(JSON.stringify({
  bars: compute.bars.map((bar) => [bar.id, bar.parts.map((part) => [part.kind, part.mb])]),
  lane: exchanges.kind,
  exposed: exchanges.bars.map((bar) => bar.exposed),
  known: exchanges.bars.every((bar) => scene.find(bar.id)),
  needs: near("needs"), feeds: near("feeds"),
  route: scene.route(1).map(({ id }) => id),
  told: scene.narrate(scene.route(1)[0]).words,
  number: scene.numMicrobatches,
  held: scene.held(0).map(([, count]) => count),
  name: scene.name(pair.event),
}));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_a_pair_is_one_bar_of_two_parts(recorded):  # noqa: F811
    page = page_data(Trace([recorded]))
    data = record_traces._Compactor(page).run()
    # As `emit_player.resolve` leaves them.
    data["functions"] = [[name, "", name] for name, _ in data["functions"]]
    asked = json.dumps({"data": data, "kinds": plan_words.kinds_data()})
    script = ROOT / "docs" / "javascripts" / "recorded_model.js"
    done = subprocess.run(
        ["node", "-e", PROGRAM, script], input=asked, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["bars"] == [
        ["0:F0", [["F", 0]]],
        ["0:F1&B0", [["F", 1], ["B", 0]]],
        ["0:F2&B1", [["F", 2], ["B", 1]]],
        ["0:B2", [["B", 2]]],
    ]
    assert (said["lane"], len(said["exposed"]), said["known"]) == ("collectives", M * 2 * 4, True)
    flights = page["steps"][0]["ranks"][0]["flights"]
    assert sum(said["exposed"]) == pytest.approx(sum(flight["w"] for flight in flights))
    assert (said["needs"], said["feeds"]) == (["0:F0"], ["0:F2&B1"])
    assert said["route"] == ["0:F1&B0", "0:F2&B1"]
    assert said["told"].startswith('route.pair{"rank":0') and "F1 & B0" in said["told"]
    assert (said["number"], said["held"], said["name"]) == (M, [1, 1, 1, 0], "F1 & B0")
