"use strict";
// When everything happens: times a plan from orders.js. The same engine as
// minimegatron/planner/imagined_transport.py and simulator.py, held to them by tests/docs/test_player_timing.py.
// It makes no order: what each stage does, and in which sequence, comes from the planner.

(() => {
  const MM = (globalThis.MM ||= {});

  // -- Orders: unpacked once, rows decoded when asked for --

  async function unpack(base64) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  const PHASES = { W: "warmup", S: "steady", C: "cooldown" };
  // mark -> is sent, is activation, where the other end is
  const MARKS = { ">": [true, true, 1], ")": [false, true, -1], "<": [true, false, -1], "(": [false, false, 1] };

  function decodeRow(word, rank, p, calls) {
    const actions = [], counts = {};
    let phase = null, call = null;
    for (const [, letter, chunkText] of word.matchAll(/(!?[a-i]|[WSCFB><()])(\d?)/g)) {
      if (letter in PHASES) { phase = PHASES[letter]; continue; }
      const code = letter.at(-1);
      if (code >= "a") {
        call = { kind: "C", rank, phase, call: calls["abcdefghi".indexOf(code)], messages: [],
          overlap: letter[0] === "!", index: actions.length };
        actions.push(call);
        continue;
      }
      const chunk = Number(chunkText || 0), key = letter + chunk;
      const mb = (counts[key] = (counts[key] ?? -1) + 1);
      if (letter in MARKS) {
        const [send, activation, step] = MARKS[letter];
        call.messages.push({ send, activation, peer: (rank + step + p) % p, mb, chunk });
      } else actions.push({ kind: letter, rank, phase, mb, chunk, index: actions.length });
    }
    return actions;
  }

  function planKey({ schedule, p, M, v, G, overlap }) {
    return `${schedule} ${p} ${M} ${v} ${G}${overlap ? " overlap" : ""}`;
  }

  // Adds plans that were loaded later.
  function merge(orders, more) {
    const before = orders.rows.length;
    orders.rows.push(...more.rows);
    for (const [key, plan] of Object.entries(more.plans)) orders.plans[key] = { ...plan, r: plan.r.map((row) => row + before) };
  }

  const decoded = new Map();

  function planOf(orders, config) {
    const key = planKey(config), found = orders.plans[key];
    if (!found) return null;
    if (decoded.size > 40) decoded.clear();
    if (!decoded.has(key)) decoded.set(key, decode(orders, config, found));
    return { config, ...decoded.get(key) };
  }

  function decode(orders, config, found) {
    const ranks = found.r.map((number, rank) => decodeRow(orders.rows[number], rank, config.p, orders.calls));
    return { ranks, batched: Boolean(found.b), formulas: found.f };
  }

  // -- The engine: each rank runs until it must wait; the n-th send meets the n-th receive --

  function simulate(plan, costs, buffered = false) {
    const p = plan.ranks.length;
    const ranks = plan.ranks.map((actions, rank) => ({
      rank, actions, index: 0, now: 0, cause: null, stuck: false, callStart: null, groups: [], open: null,
      waited: 0, onTheirWay: new Map(),
      sent: Array.from({ length: p }, () => []), received: Array.from({ length: p }, () => []),
      starts: [], ends: [], waits: [], causes: [],
    }));
    const ready = [...ranks];

    function record(state, start, wait) {
      state.starts.push(start);
      state.ends.push(state.now);
      state.waits.push(wait);
      state.causes.push(state.cause);
    }

    function compute(state, action) {
      if (state.onTheirWay.size) {
        const needs = `${action.kind} ${action.mb} ${action.chunk}`;
        const receive = state.onTheirWay.get(needs);
        if (receive) {
          if (!finish(state, [receive])) return false;
          state.onTheirWay.delete(needs);
        }
      }
      const start = state.now;
      state.now = start + (action.kind === "F" ? costs.forward : costs.backward)[state.rank][action.chunk];
      record(state, start, 0);
      state.cause = [state.rank, state.index];
      return true;
    }

    function communicate(state, action) {
      if (state.callStart === null) {
        state.callStart = state.now;
        state.waited = 0;
        if (action.overlap) {
          for (const message of action.messages) {
            const opened = begin(state, message);
            if (!message.send)
              state.onTheirWay.set(`${message.activation ? "F" : "B"} ${message.mb} ${message.chunk}`, opened);
          }
        } else if (plan.batched) state.groups.push(action.messages);
        else for (const message of action.messages.toReversed()) state.groups.push([message]);
      }
      while (state.open || state.groups.length) {
        if (!state.open) state.open = state.groups.pop().map((message) => begin(state, message));
        if (!finish(state, state.open)) return false;
        state.open = null;
      }
      record(state, state.callStart, state.waited);
      state.callStart = null;
      return true;
    }

    function begin(state, message) {
      const peer = ranks[message.peer];
      const mine = message.send ? state.sent[peer.rank] : state.received[peer.rank];
      const partners = message.send ? peer.received[state.rank] : peer.sent[state.rank];
      mine.push([state.now, state.cause]);
      if (peer.stuck) {
        peer.stuck = false;
        ready.push(peer);
      }
      return { message, partners, number: mine.length - 1, time: state.now };
    }

    function finish(state, group) {
      let end = state.now, wait = 0, cause = state.cause;
      for (const { message, partners, number, time } of group) {
        if (buffered && message.send) continue;
        if (partners.length <= number) return false;
        let [partnerTime, partnerCause] = partners[number], transfer = costs.message;
        if (buffered) [partnerTime, transfer] = [partnerTime + transfer, 0];
        const isLate = partnerTime > time;
        const thisEnd = (isLate ? partnerTime : time) + transfer;
        if (thisEnd > end) {
          end = thisEnd;
          [cause, wait] = isLate ? [partnerCause, partnerTime - time] : [state.cause, 0];
        }
      }
      state.now = end;
      state.cause = cause;
      state.waited += wait;
      return true;
    }

    for (let state; (state = ready.shift()); ) {
      state.stuck = false;
      for (; state.index < state.actions.length; state.index++) {
        const action = state.actions[state.index];
        if (!(action.kind === "C" ? communicate : compute)(state, action)) {
          state.stuck = true;
          break;
        }
      }
    }
    if (ranks.some((state) => state.stuck)) {
      if (!plan.mayStick) throw new Error("this plan never finishes");
      plan = untilStuck(plan, ranks);
    }
    const lists = (name) => ranks.map((state) => state[name]);
    return analyse(plan, costs, lists("starts"), lists("ends"), lists("waits"), lists("causes"));
  }

  // What was done of a plan that never finishes; `stuck` says in which action each rank waits.
  function untilStuck(plan, ranks) {
    return { ...plan, ranks: ranks.map(({ actions, starts }) => actions.slice(0, starts.length)),
      stuck: new Map(ranks.filter(({ stuck }) => stuck).map(({ rank, actions, index }) => [rank, actions[index]])) };
  }

  // -- What follows from the times --

  function analyse(plan, costs, starts, ends, waits, causes) {
    const work = plan.ranks.map((actions) => actions.filter((action) => action.kind !== "C"));
    const makespan = Math.max(0, ...ends.map((list) => list.at(-1) ?? 0));
    const busy = work.map((actions, rank) => {
      const counts = {};
      for (const { kind, chunk } of actions) counts[kind + chunk] = (counts[kind + chunk] || 0) + 1;
      return Object.entries(counts).reduce((sum, [key, count]) =>
        sum + count * (key[0] === "F" ? costs.forward : costs.backward)[rank][Number(key.slice(1))], 0);
    });
    const allBusy = busy.reduce((a, b) => a + b, 0);
    const allIdle = makespan * work.length - allBusy;
    const step = {
      plan, costs, starts, ends, waits, causes, work, makespan, busy,
      idle: busy.map((time) => makespan - time),
      overIdeal: allBusy ? allIdle / allBusy : 0,
      overTotal: allBusy + allIdle ? allIdle / (allBusy + allIdle) : 0,
    };
    step.lastWork = lastWork(step);
    step.gaps = work.map((_, rank) => gaps(step, rank));
    step.held = work.map((_, rank) => held(step, rank));
    step.peaks = step.held.map((points) => Math.max(0, ...points.map(([, count]) => count)));
    step.startOf = ({ rank, index }) => starts[rank][index];
    step.endOf = ({ rank, index }) => ends[rank][index];
    return step;
  }

  function gaps(step, rank) {
    const found = [];
    let freeSince = 0;
    for (const { index } of step.work[rank]) {
      const start = step.starts[rank][index];
      if (start > freeSince) found.push({ rank, start: freeSince, end: start, before: index, waitsFor: step.causes[rank][index] });
      freeSince = step.ends[rank][index];
    }
    if (step.makespan > freeSince)
      found.push({ rank, start: freeSince, end: step.makespan, before: null, waitsFor: step.lastWork });
    return found;
  }

  function lastWork(step) {
    let last = null;
    step.work.forEach((actions, rank) => {
      const index = actions.at(-1)?.index;
      if (index === undefined) return;
      if (!last || step.ends[rank][index] > step.ends[last[0]][last[1]]) last = [rank, index];
    });
    return last;
  }

  // Which forwards and backwards set the step's length, first to last.
  function criticalPath(step) {
    const path = [];
    for (let place = step.lastWork; place; place = step.causes[place[0]][place[1]]) path.push(place);
    return path.reverse();
  }

  // [time, microbatches held from then on]: from a forward's start to its backward's end.
  function held(step, rank) {
    let count = 0;
    return step.work[rank].map(({ kind, index }) =>
      kind === "F" ? [step.starts[rank][index], ++count] : [step.ends[rank][index], --count]);
  }

  // -- What work needs, whatever the schedule: the model's own data flow --

  function needs(config, { kind, rank, mb, chunk }) {
    const { p, v } = config;
    const virtual = chunk * p + rank, at = (stage) => ({ rank: stage % p, chunk: Math.floor(stage / p), mb });
    if (kind === "F") return virtual ? [{ kind: "F", ...at(virtual - 1) }] : [];
    const own = { kind: "F", rank, mb, chunk };
    return virtual === p * v - 1 ? [own] : [{ kind: "B", ...at(virtual + 1) }, own];
  }

  function neededBy(config, { kind, rank, mb, chunk }) {
    const { p, v } = config;
    const virtual = chunk * p + rank, at = (stage) => ({ rank: stage % p, chunk: Math.floor(stage / p), mb });
    if (kind === "B") return virtual ? [{ kind: "B", ...at(virtual - 1) }] : [];
    const own = { kind: "B", rank, mb, chunk };
    return virtual === p * v - 1 ? [own] : [{ kind: "F", ...at(virtual + 1) }, own];
  }

  function find(step, { kind, rank, mb, chunk }) {
    return step.work[rank].find((a) => a.kind === kind && a.mb === mb && a.chunk === chunk);
  }

  MM.engine = { unpack, merge, planKey, planOf, simulate, criticalPath, needs, neededBy, find };
})();
