// Run by test_player_timing.py: node player_timing.js engine.js orders.js < cases > answers, a line each.
"use strict";
require(process.argv[2]);
require(process.argv[3]);
require(process.argv[3].replace("orders.js", "orders_interleaved.js"));
const { engine, packed } = globalThis.MM;
Promise.all([engine.unpack(packed.orders), engine.unpack(packed.orders_interleaved)]).then(([orders, more]) => {
  engine.merge(orders, more);
  const cases = require("fs").readFileSync(0, "utf8").trim().split("\n");
  for (const line of cases) {
    const { key, forward, backward, message, buffered } = JSON.parse(line);
    const [schedule, p, M, v, G, overlap] = key.split(" ");
    const config = { schedule, p: +p, M: +M, v: +v, G: +G, overlap: Boolean(overlap) };
    const step = engine.simulate(engine.planOf(orders, config), { forward, backward, message }, buffered);
    const { starts, ends, waits, causes, makespan, idle, overIdeal, overTotal, peaks } = step;
    const gaps = step.gaps.map((list) => list.map((g) => [g.start, g.end, g.before, g.waitsFor]));
    const sums = [starts, ends, waits].map((lists) => lists.map((list) => list.reduce((a, b) => a + b, 0)));
    const answer = { sums, makespan, idle, overIdeal, overTotal, peaks, gaps, critical: engine.criticalPath(step) };
    if (process.argv[4] === "whole") {
      const actions = step.plan.ranks.map((list) => list.map((a) => [a.kind, a.mb ?? null, a.chunk ?? null,
        a.phase, a.call ?? null,
        (a.messages ?? []).map((m) => [m.send, m.activation, m.peer, m.mb, m.chunk]), a.overlap ?? false]));
      Object.assign(answer, { starts, ends, waits, causes, actions });
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
});
