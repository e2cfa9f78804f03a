"use strict";
// When everything happens: times a plan from orders.js. The same engine as
// minimegatron/planner/imagined_transport.py and simulator.py, held to them by tests/docs/test_player_timing.py.
// It makes no order and knows no placement: what each stage does, in which sequence, and what that needs
// comes from the planner (docs/tools/player/plan_words.py says how it is written down).
//
// A plan is a graph. Its nodes, `plan.ranks[rank][index]`:
//   work           {id, kind: letter, rank, lane, phase, mb, chunk, index}
//   a pair         the same with kind "P" and `parts`, two pieces of work without a place of their own
//   communication  {id, kind: "C", rank, phase, call, messages, overlap, index}
// Its edges: `needs(plan, work)` and `feeds(plan, work)`. `plan.kinds[letter]` has each kind's holds and cost.

(() => {
  const MM = (globalThis.MM ||= {});

  // -- Plans: unpacked once, rows decoded when asked for --

  async function unpack(base64) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  const PHASES = { U: "warmup", S: "steady", C: "cooldown", N: null };
  // mark -> is sent, is activation, in which of the placement's tables the other end is
  const MARKS = { ">": [true, true, "next"], ")": [false, true, "prev"], "<": [true, false, "prev"], "(": [false, false, "next"] };
  const WORDS = /(!?[a-j]|[A-Z]|[<>()])(\d*)(?:@(\d+))?/g;

  function decodeRow(word, rank, { calls, kinds }, placement) {
    const actions = [], counts = {}, hasChunks = placement.stages[0].length > 1;
    let phase = null, call = null, pair = null;
    const nameOf = (letter, mb, chunk) => letter + mb + (hasChunks ? `.${chunk}` : "");
    for (const [, letter, chunkText, mbText] of word.matchAll(WORDS)) {
      const code = letter.at(-1);
      if (code >= "a") {
        call = { id: "", kind: "C", rank, phase, call: calls[code.charCodeAt(0) - 97], messages: [], overlap: letter[0] === "!", index: actions.length };
        actions.push(call);
        continue;
      }
      if (letter in PHASES) { phase = PHASES[letter]; continue; }
      if (letter === "P") { pair = []; continue; }
      const chunk = Number(chunkText || 0), key = letter + chunk;
      const mb = mbText === "" || mbText === undefined ? counts[key] ?? 0 : Number(mbText);
      counts[key] = mb + 1;
      if (letter in MARKS) {
        const [send, activation, table] = MARKS[letter];
        call.messages.push({ send, activation, peer: placement[table][rank][chunk][0], mb, chunk });
        continue;
      }
      const work = { id: "", kind: letter, rank, lane: kinds[letter].lane, phase, mb, chunk, index: actions.length };
      if (pair === null) {
        work.id = `${rank}:${nameOf(letter, mb, chunk)}`;
        actions.push(work);
        continue;
      }
      pair.push(work);
      if (pair.length < 2) continue;
      const names = pair.map((part) => nameOf(part.kind, part.mb, part.chunk));
      actions.push({ ...pair[0], id: `${rank}:${names.join("&")}`, kind: "P", parts: pair });
      pair = null;
    }
    distinguish(actions);
    return actions;
  }

  // A reader's plan may do the same thing twice: ids are nevertheless different.
  function distinguish(actions) {
    const seen = new Map();
    let number = 0;
    for (const action of actions) {
      if (action.kind === "C") { action.id = `${action.rank}:call${number++}`; continue; }
      const times = (seen.get(action.id) ?? 0) + 1;
      seen.set(action.id, times);
      if (times > 1) action.id += `#${times}`;
    }
  }

  const partsOf = (action) => action.parts || [action];

  function planKey({ schedule, p, M, v, G, overlap }) {
    return `${schedule} ${p} ${M} ${v} ${G}${overlap ? " overlap" : ""}`;
  }

  // Adds plans that were loaded later.
  function merge(orders, more) {
    const [rows, placements] = [orders.rows.length, orders.placements.length];
    orders.rows = orders.rows.concat(more.rows);
    orders.placements.push(...more.placements);
    for (const [key, plan] of Object.entries(more.plans)) orders.plans[key] = { ...plan, r: plan.r.map((row) => row + rows), p: plan.p + placements };
  }

  const decoded = new Map();

  function planOf(orders, config) {
    const key = planKey(config), found = orders.plans[key];
    if (!found) return null;
    if (decoded.size > 40) decoded.clear();
    if (!decoded.has(key)) decoded.set(key, decode(orders, found.r.map((number) => orders.rows[number]), orders.placements[found.p], found));
    return { config, ...decoded.get(key) };
  }

  // From rows and a placement to a plan. `more`: b batched, w tagged, n pairs free by layers, f formulas.
  function decode(orders, rows, placement, more = {}) {
    const ranks = rows.map((word, rank) => decodeRow(word, rank, orders, placement));
    return { ranks, placement, kinds: orders.kinds, letters: lettersOf(ranks, orders.kinds), hasPairs: ranks.some((actions) => actions.some((action) => action.parts)), batched: Boolean(more.b), tagged: Boolean(more.w), byLayers: Boolean(more.n), formulas: more.f ?? {}, units: unitsOf(ranks) };
  }

  function lettersOf(ranks, kinds) {
    const found = new Set();
    for (const actions of ranks) for (const action of actions) if (action.kind !== "C") for (const part of partsOf(action)) found.add(part.kind);
    return Object.keys(kinds).filter((letter) => found.has(letter));
  }

  const unit = (letter, rank, chunk, mb) => `${letter}${rank}.${chunk}.${mb}`;

  function unitsOf(ranks) {
    const units = new Map();
    for (const actions of ranks) for (const action of actions)
      if (action.kind !== "C") for (const part of partsOf(action)) units.set(unit(part.kind, action.rank, part.chunk, part.mb), action);
    return units;
  }

  // -- Edges: what work needs, whatever the schedule --

  function find(plan, letters, rank, chunk, mb) {
    for (const letter of letters) {
      const action = plan.units.get(unit(letter, rank, chunk, mb));
      if (action) return action;
    }
    return null;
  }

  function follow(plan, action, table) {
    const found = new Set();
    for (const part of partsOf(action))
      for (const [letters, rank, chunk] of table[part.kind]?.[action.rank]?.[part.chunk] ?? []) {
        const other = find(plan, letters, rank, chunk, part.mb);
        if (other && other !== action) found.add(other);
      }
    return [...found];
  }

  const needs = (plan, action) => follow(plan, action, plan.placement.needs);
  const feeds = (plan, action) => follow(plan, action, (plan.placement.feeds ??= turned(plan.placement.needs)));

  function turned(table) {
    const back = {};
    for (const [letter, ranks] of Object.entries(table)) ranks.forEach((chunks, rank) => chunks.forEach((entries, chunk) => {
      for (const [letters, otherRank, otherChunk] of entries) for (const other of letters)
        (((back[other] ??= [])[otherRank] ??= [])[otherChunk] ??= []).push([letter, rank, chunk]);
    }));
    return back;
  }

  // -- The engine: each rank runs until it must wait; the n-th send meets the n-th receive --

  // `costs`: {times: {letter: [rank][chunk]}, message, pair: function of two times}.
  function simulate(plan, costs, buffered = false) {
    const p = plan.ranks.length, { kinds } = plan;
    const lists = () => {
      const both = Array.from({ length: p }, () => []);
      return { true: both, false: plan.tagged ? Array.from({ length: p }, () => []) : both };
    };
    const ranks = plan.ranks.map((actions, rank) => ({
      rank, actions, index: 0, now: 0, cause: null, stuck: false, callStart: null, groups: [], open: null,
      waited: 0, onTheirWay: new Map(), sent: lists(), received: lists(), starts: [], ends: [], waits: [], causes: [],
    }));
    const ready = [...ranks];

    function record(state, start, wait) {
      state.starts.push(start);
      state.ends.push(state.now);
      state.waits.push(wait);
      state.causes.push(state.cause);
    }

    function timeOf(state, action) {
      const times = partsOf(action).map((part) => costs.times[part.kind][state.rank][part.chunk]);
      return times.length === 1 ? times[0] : costs.pair ? costs.pair(...times) : times[0] + times[1];
    }

    function compute(state, action) {
      if (state.onTheirWay.size) {
        const keys = partsOf(action).map((part) => `${kinds[part.kind].takes} ${part.mb} ${part.chunk}`).filter((key) => state.onTheirWay.has(key));
        if (keys.length) {
          if (!finish(state, keys.map((key) => state.onTheirWay.get(key)))) return false;
          for (const key of keys) state.onTheirWay.delete(key);
        }
      }
      const start = state.now;
      state.now = start + timeOf(state, action);
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
            if (!message.send) state.onTheirWay.set(`${message.activation ? "activation" : "gradient"} ${message.mb} ${message.chunk}`, opened);
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
      const peer = ranks[message.peer], { activation } = message;
      const mine = (message.send ? state.sent : state.received)[activation][peer.rank];
      const partners = (message.send ? peer.received : peer.sent)[activation][state.rank];
      mine.push([state.now, state.cause, message, state.index]);
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
    const found = (name) => ranks.map((state) => state[name]);
    const step = analyse(plan, costs, found("starts"), found("ends"), found("waits"), found("causes"));
    step.exchanged = () => (step.messages ??= exchanged(ranks, costs.message, buffered, plan.tagged));
    return step;
  }

  // What was done of a plan that never finishes; `stuck` says in which action each rank waits.
  function untilStuck(plan, ranks) {
    const done = ranks.map(({ actions, starts }) => actions.slice(0, starts.length));
    return { ...plan, ranks: done, units: unitsOf(done),
      stuck: new Map(ranks.filter(({ stuck }) => stuck).map(({ rank, actions, index }) => [rank, actions[index]])) };
  }

  // Every message that was met: who sent what to whom, in which call, and from when to when it travelled.
  function exchanged(ranks, transfer, buffered, tagged) {
    const messages = [];
    for (const from of ranks) for (const activation of tagged ? [true, false] : [true]) from.sent[activation].forEach((sent, to) => {
      const received = ranks[to].received[activation][from.rank];
      sent.slice(0, received.length).forEach(([time, , message, index], number) => {
        const [theirs, , other, otherIndex] = received[number];
        const start = buffered ? time : Math.max(time, theirs);
        messages.push({ from: from.rank, to, activation: message.activation, mb: message.mb, chunk: message.chunk, toMb: other.mb, toChunk: other.chunk,
          sent: index, received: otherIndex, asked: time, start, end: start + transfer });
      });
    });
    return messages;
  }

  // -- What follows from the times --

  function analyse(plan, costs, starts, ends, waits, causes) {
    const work = plan.ranks.map((actions) => actions.filter((action) => action.kind !== "C"));
    const makespan = ends.reduce((most, list) => Math.max(most, list.at(-1) ?? 0), 0);
    const busy = work.map((actions, rank) => {
      const counts = new Map();
      for (const action of actions) {
        const key = partsOf(action).map((part) => part.kind + part.chunk).join("&");
        const entry = counts.get(key);
        if (entry) entry.count++;
        else {
          const times = partsOf(action).map((part) => costs.times[part.kind][rank][part.chunk]);
          counts.set(key, { count: 1, time: times.length === 1 ? times[0] : costs.pair ? costs.pair(...times) : times[0] + times[1] });
        }
      }
      return [...counts.values()].reduce((sum, { count, time }) => sum + count * time, 0);
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
    step.owed = plan.letters.some((letter) => plan.kinds[letter].owes) ? work.map((_, rank) => owed(step, rank)) : null;
    step.peaks = step.held.map((points) => points.reduce((most, [, count]) => Math.max(most, count), 0));
    step.startOf = ({ rank, index }) => starts[rank][index];
    step.endOf = ({ rank, index }) => ends[rank][index];
    return step;
  }

  function gaps(step, rank) {
    const found = [];
    let freeSince = 0;
    for (const { index, id } of step.work[rank]) {
      const start = step.starts[rank][index];
      if (start > freeSince) found.push({ id: `${rank}:idle-before-${id.slice(id.indexOf(":") + 1)}`, rank, start: freeSince, end: start, before: index, waitsFor: step.causes[rank][index] });
      freeSince = step.ends[rank][index];
    }
    if (step.makespan > freeSince)
      found.push({ id: `${rank}:idle-at-the-end`, rank, start: freeSince, end: step.makespan, before: null, waitsFor: step.lastWork });
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

  // From a piece of work back to the first that let it start: [rank, index], the first one first.
  function causesOf(step, place) {
    const path = [];
    for (; place; place = step.causes[place[0]][place[1]]) path.push(place);
    return path.reverse();
  }

  // Which work sets the step's length, first to last.
  const criticalPath = (step) => causesOf(step, step.lastWork);

  // [time, microbatches held from then on]. A pair holds what either of its parts needs; one that frees by
  // layers, what is left of both.
  function held(step, rank) {
    let count = 0;
    const points = [];
    for (const action of step.work[rank]) {
      const all = partsOf(action).map((part) => step.plan.kinds[part.kind].holds);
      const changes = step.plan.byLayers ? [all.reduce((sum, change) => sum + change, 0)] : all;
      const more = changes.reduce((sum, change) => sum + Math.max(change, 0), 0);
      const less = changes.reduce((sum, change) => sum + Math.min(change, 0), 0);
      if (more) points.push([step.starts[rank][action.index], (count += more)]);
      if (less) points.push([step.ends[rank][action.index], (count += less)]);
    }
    return points;
  }

  // [time, weight gradients that are owed from then on].
  function owed(step, rank) {
    let count = 0;
    const points = [];
    for (const action of step.work[rank]) {
      const change = partsOf(action).reduce((sum, part) => sum + step.plan.kinds[part.kind].owes, 0);
      if (change) points.push([step.ends[rank][action.index], (count += change)]);
    }
    return points;
  }

  MM.engine = { unpack, merge, planKey, planOf, decode, simulate, criticalPath, causesOf, needs, feeds, find, partsOf };
})();
