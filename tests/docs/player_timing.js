// Run by test_player_timing.py: node player_timing.js engine.js FOLDER < cases > answers, a line each. A case
// has the key of a plan in FOLDER/orders*.js, or brings its own plan as docs/tools/player/in_browser.py writes it.
"use strict";
const path = require("path"), fs = require("fs");
require(process.argv[2]);
const folder = process.argv[3];
for (const name of fs.readdirSync(folder).filter((name) => /^orders.*\.js$/.test(name)).sort()) require(path.join(folder, name));
const { engine, packed } = globalThis.MM;

async function load() {
  const orders = await engine.unpack(packed.orders);
  for (const name of Object.keys(packed).filter((name) => name.startsWith("orders_"))) engine.merge(orders, await engine.unpack(packed[name]));
  return orders;
}

function planOf(orders, { key, plan }) {
  if (plan) return engine.decode(orders, plan.rows, plan.placement, plan);
  const [schedule, p, M, v, G, overlap] = key.split(" ");
  return engine.planOf(orders, { schedule, p: +p, M: +M, v: +v, G: +G, overlap: Boolean(overlap) });
}

const placeOf = (action) => [action.rank, action.index];
const inOrder = (list) => list.map(placeOf).sort((a, b) => a[0] - b[0] || a[1] - b[1]);

load().then((orders) => {
  for (const line of fs.readFileSync(0, "utf8").trim().split("\n")) {
    const asked = JSON.parse(line), { times, message, buffered, pairs, whole } = asked;
    const step = engine.simulate(planOf(orders, asked), { times, message, pair: pairs === "max" ? Math.max : null }, buffered);
    const { starts, ends, waits, causes, makespan, idle, overIdeal, overTotal, peaks, plan } = step;
    const gaps = step.gaps.map((list) => list.map((g) => [g.start, g.end, g.before, g.waitsFor]));
    const sums = [starts, ends, waits].map((lists) => lists.map((list) => list.reduce((a, b) => a + b, 0)));
    const answer = { sums, makespan, idle, overIdeal, overTotal, peaks, gaps, critical: engine.criticalPath(step) };
    if (whole) {
      const parts = (a) => engine.partsOf(a).map((part) => [part.kind, part.mb ?? null, part.chunk ?? null]);
      const actions = plan.ranks.map((list) => list.map((a) => [parts(a), a.phase, a.call ?? null,
        (a.messages ?? []).map((m) => [m.send, m.activation, m.peer, m.mb, m.chunk]), a.overlap ?? false]));
      const work = step.work.flat();
      Object.assign(answer, { starts, ends, waits, causes, actions, ids: work.map((a) => a.id),
        needs: work.map((a) => inOrder(engine.needs(plan, a))), feeds: work.map((a) => inOrder(engine.feeds(plan, a))),
        owed: step.owed && step.owed.map((points) => points.map(([, count]) => count)),
        messages: step.exchanged().map((m) => [m.from, m.to, m.activation, m.mb, m.toMb, m.start, m.end]) });
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
});
