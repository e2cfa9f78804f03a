"use strict";
// The view model of a recorded run: the same tracks, lanes, strips and questions as of a plan (model.js), from
// what `minimegatron trace` knows of the run. docs/tools/records/traces.py says what a recording holds.
//
// Ids: "2:F3" is the forward of microbatch 3 on stage 2; "2:idle-before-F3" the gap before it;
// "2:backward_step.4" the fifth call of that function there; "1>2:F3" a message; "2:F6&B2" a pair.

(() => {
  const MM = (globalThis.MM ||= {});
  const say = (...words) => MM.say(...words);
  // In the language of the page (recorded_words.js); as it was recorded where that is not loaded.
  const recorded = (text) => MM.recorded?.(text) ?? text;

  MM.milliseconds = (us) => {
    const value = us / 1000, size = Math.abs(value);
    return `${value.toFixed(size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3)} ms`;
  };
  const ms = MM.milliseconds;

  // "0.6 ms before F1: 0 ms waiting, 0 ms transfer, 0.6 ms own work" without what took no time.
  MM.withoutZeros = (words) => words.replace(/\b0 ms [^,:]+, /g, "").replace(/, 0 ms [^,:]+$/, "");

  // The single pieces of work of an event: {k: name of the kind, m, c}.
  const partsOf = (event) => event.q?.map(([k, m, c]) => ({ k, m, c })) ?? [event];

  // A filter for work that is there, and was not there before: both halves of a pair may name the same.
  const isNew = () => {
    const seen = new Set();
    return (found) => found && !seen.has(found.event) && seen.add(found.event);
  };

  MM.RecordedScene = class RecordedScene {
    // `data`: the recording; `step`: one of its steps; `kinds`: the table of kinds by letter.
    constructor(data, step, kinds) {
      Object.assign(this, { data, step, kinds });
      this.letters = Object.fromEntries(Object.entries(kinds).map(([letter, kind]) => [kind.name, letter]));
      this.hasChunks = step.chunks > 1;
      this.shades = Object.fromEntries(Object.entries(step.colours).map(([name, shades]) => [this.letters[name] ?? name, shades.map(([fill, ink]) => [fill, ink, kinds[this.letters[name]]?.fill])]));
      this.byIndex = step.ranks.map((owner) => new Map(owner.events.map((event) => [event.i, event])));
      this.workOf = step.ranks.map((owner) => owner.events.filter((event) => this.isWork(event)));
      this.ids = new Map();
      step.ranks.forEach((owner, rank) => this.nameAll(owner, rank));
      this.messages = step.messages.filter((m) => m.b).map((m) => this.named(m));
      for (const message of this.messages) this.ids.set(message.id, { message });
    }

    // -- Names --

    nameAll(owner, rank) {
      const counts = new Map(), seen = new Set();
      for (const event of owner.events) {
        const isWork = this.isWork(event), name = isWork ? this.unit(event) : event.a || this.functionName(event);
        const number = counts.get(name) ?? 0;
        counts.set(name, number + 1);
        event.id = isWork && !seen.has(name) ? `${rank}:${name}` : `${rank}:${name}.${number}`;
        seen.add(name);
        this.ids.set(event.id, { rank, event });
      }
      for (const gap of owner.gaps) {
        gap.words = recorded(MM.withoutZeros(gap.x));
        const next = gap.b === null || gap.b === undefined ? null : this.byIndex[rank].get(gap.b);
        gap.id = next ? `${rank}:idle-before-${next.id.slice(next.id.indexOf(":") + 1)}` : `${rank}:idle-at-the-end`;
        this.ids.set(gap.id, { rank, gap });
      }
    }

    named(m) {
      const isGradient = m.x.startsWith("gradient"), maker = this.byIndex[m.a[0]].get(m.d);
      const part = maker && partsOf(maker).find(({ k }) => (k === "forward") !== isGradient);
      return { ...m, x: recorded(m.x), id: `${m.a[0]}>${m.b[0]}:${isGradient ? "B" : "F"}${part ? this.unit(part).slice(1) : "?"}`, mb: part?.m, isGradient };
    }

    isWork(event) {
      return event.k in this.letters || Boolean(event.q);
    }

    unit(event) {
      return partsOf(event).map(({ k, m, c }) => `${this.letters[k]}${m}${this.hasChunks ? `.${c}` : ""}`).join("&");
    }

    functionName(event) {
      return this.data.functions[event.f][0].split(".").at(-1);
    }

    name(event) {
      if (this.isWork(event)) return partsOf(event).map(({ k, m, c }) => `${this.letters[k]}${m}${this.hasChunks ? say("name.chunk", { chunk: c }) : ""}`).join(" & ");
      return event.a || this.data.functions[event.f][0];
    }

    find(id) {
      return this.ids.get(id) ?? null;
    }

    at([rank, index]) {
      const event = this.byIndex[rank].get(index);
      return event && { rank, event };
    }

    // -- The view --

    tracks({ ghost, messages }) {
      const most = Math.max(...this.step.ranks.map((_, rank) => Math.max(...this.held(rank).map(([, count]) => count), 0)));
      return this.step.ranks.map((owner, rank) => ({
        rank, name: say("timeline.stage", { rank }), note: say("replay.rank", { rank: owner.rank }),
        lanes: [
          { kind: "compute", bars: this.work(rank).map((e) => this.bar(e)), gaps: owner.gaps.map(({ s, l, id }) => ({ s, l, id })),
            transfers: owner.events.filter((e) => e.t && !this.isWork(e) && e.k !== "communicate").map((e) => ({ s: e.s + e.l - e.t, l: e.t })) },
          ...(owner.flights?.length ? [{ kind: "collectives", bars: owner.flights.map((flight) => this.flight(rank, flight)) }] : []),
          ...(messages ? [{ kind: "messages", bars: this.messages.filter((m) => m.a[0] === rank).map((m) => ({ s: m.a[2], l: m.b[2] - m.a[2], id: m.id, label: m.id.split(":")[1], parts: [{ kind: "F", mb: m.mb }] })) }] : []),
          ...(ghost ? [{ kind: "ghost", bars: owner.plan.map((bar) => ({ s: bar.s, l: bar.l, parts: [{ kind: this.letters[bar.k], chunk: bar.c }] })) }] : []),
        ],
        strips: [{ kind: "held", points: this.held(rank), most, cap: 0 }],
      }));
    }

    work(rank) {
      return this.workOf[rank];
    }

    bar(event) {
      return { s: event.s, l: event.l, id: event.id, parts: partsOf(event).map(({ k, m, c }) => ({ kind: this.letters[k], chunk: c, mb: m })) };
    }

    // An all-to-all or a hop, from its start to the end of the wait for it; `exposed` is the length of that wait.
    flight(rank, { s, l, w, i, n }) {
      const event = this.byIndex[rank].get(i);
      return { s, l, exposed: w, id: event.id, label: n, parts: [{ mb: event.m }] };
    }

    held(rank) {
      let count = 0;
      return this.work(rank).map((event) => {
        // In a pair the backward frees layer after layer what the forward comes to hold.
        const holds = partsOf(event).reduce((sum, { k }) => sum + this.kinds[this.letters[k]].holds, 0);
        return [holds > 0 ? event.s : event.s + event.l, (count += holds)];
      });
    }

    // -- Why --

    gapBefore(rank, event) {
      return this.step.ranks[rank].gaps.find((gap) => gap.b === event.i) ?? null;
    }

    // What work needs: its own stage's forward, and the maker of the message that it uses.
    needs(rank, event) {
      const own = partsOf(event).filter(({ k }) => this.kinds[this.letters[k]].takes === "gradient").map((part) => this.same(rank, part, "forward"));
      return [...this.messages.filter((m) => m.b[0] === rank && m.u === event.i).map((m) => this.at([m.a[0], m.d])), ...own].filter(isNew());
    }

    feeds(rank, event) {
      const own = partsOf(event).filter(({ k }) => k === "forward").map((part) => this.same(rank, part, "backward"));
      return [...this.messages.filter((m) => m.a[0] === rank && m.d === event.i).map((m) => this.at([m.b[0], m.u])), ...own].filter(isNew());
    }

    // Work of another kind on the same microbatch and chunk, perhaps half of a pair.
    same(rank, { m, c }, kind) {
      const found = this.work(rank).find((other) => partsOf(other).some((part) => part.k === kind && part.m === m && part.c === c));
      return found && { rank, event: found };
    }

    // What let this work start: on another stage, or the work before it on its own.
    causeOf({ rank, event }) {
      const gap = this.gapBefore(rank, event), cause = gap?.f && this.at(gap.f);
      if (cause && this.isWork(cause.event)) return cause;
      const work = this.work(rank), place = work.indexOf(event);
      return place > 0 ? { rank, event: work[place - 1] } : null;
    }

    // From the root to the work that ends the gap.
    causalChain({ rank, gap }) {
      const path = [], seen = new Set();
      let at = gap.f && this.at(gap.f);
      if (at && !this.isWork(at.event)) at = null;
      for (; at && !seen.has(at.event); at = this.causeOf(at)) {
        seen.add(at.event);
        path.push(at);
      }
      path.reverse();
      const last = gap.b !== null && gap.b !== undefined && this.byIndex[rank].get(gap.b);
      return last && this.isWork(last) ? [...path, { rank, event: last }] : path;
    }

    path(chain) {
      return chain.map(({ rank, event }) => ({ track: rank, s: event.s, e: event.s + event.l }));
    }

    // -- One microbatch --

    has(bar, mb) {
      return bar.parts.some((part) => part.mb === mb);
    }

    route(mb) {
      const work = this.step.ranks.flatMap((_, rank) => this.work(rank).filter((event) => partsOf(event).some(({ m }) => m === mb))
        .map((event) => ({ kind: "work", id: event.id, rank, s: event.s, e: event.s + event.l, event })));
      const messages = this.messages.filter((m) => m.mb === mb).map((message) => ({ kind: "message", id: message.id, rank: message.a[0], s: message.a[2], e: message.b[2], message }));
      return [...work, ...messages].sort((a, b) => a.s - b.s || a.e - b.e);
    }

    get numMicrobatches() {
      return 1 + Math.max(...this.step.ranks.flatMap((_, rank) => this.work(rank).flatMap((event) => partsOf(event).map(({ m }) => m))), 0);
    }

    narrate({ kind, rank, event, message }) {
      if (kind === "message") {
        const call = this.byIndex[message.a[0]].get(message.a[1]);
        const facts = { from: message.a[0], to: message.b[0], call: call ? this.name(call) : "", start: ms(message.a[2]), end: ms(message.b[2]) };
        return { words: say(message.isGradient ? "route.gradient" : "route.activation", facts), frames: call ? this.frames(call) : null };
      }
      const gap = this.gapBefore(rank, event), chunk = this.hasChunks ? say("name.chunk", { chunk: event.c }) : "";
      const words = [say(`route.${event.k}`, { rank, start: ms(event.s), end: ms(event.s + event.l), chunk, names: this.name(event) })];
      if (gap) words.push(`${gap.words}.`);
      return { words: words.join(" "), frames: this.frames(event) };
    }

    // The lines that lead to a call, outermost first, and the call itself.
    frames(event) {
      const [name, url, dotted] = this.data.functions[event.f];
      return [...this.data.stacks[event.st].map((number) => this.data.frames[number]), [dotted || name, url, ""]];
    }
  };
})();
