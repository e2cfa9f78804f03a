"use strict";
// The view model of a recorded run: the same tracks, lanes, strips and questions as of a plan (model.js), from
// what `minimegatron trace` knows of the run. docs/tools/record_traces.py says what a recording holds.
//
// Ids: "2:F3" is the forward of microbatch 3 on stage 2; "2:idle-before-F3" the gap before it;
// "2:backward_step.4" the fifth call of that function there; "1>2:F3" a message.

(() => {
  const MM = (globalThis.MM ||= {});
  const say = (...words) => MM.say(...words);

  MM.milliseconds = (us) => {
    const value = us / 1000, size = Math.abs(value);
    return `${value.toFixed(size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3)} ms`;
  };
  const ms = MM.milliseconds;

  // "0.6 ms before F1: 0 ms waiting, 0 ms transfer, 0.6 ms own work" without what took no time.
  MM.withoutZeros = (words) => words.replace(/\b0 ms [^,:]+, /g, "").replace(/, 0 ms [^,:]+$/, "");

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
        gap.words = MM.withoutZeros(gap.x);
        const next = gap.b === null || gap.b === undefined ? null : this.byIndex[rank].get(gap.b);
        gap.id = next ? `${rank}:idle-before-${next.id.slice(next.id.indexOf(":") + 1)}` : `${rank}:idle-at-the-end`;
        this.ids.set(gap.id, { rank, gap });
      }
    }

    named(m) {
      const maker = this.byIndex[m.a[0]].get(m.d), isGradient = m.x.startsWith("gradient");
      return { ...m, id: `${m.a[0]}>${m.b[0]}:${isGradient ? "B" : "F"}${maker ? this.unit(maker).slice(1) : "?"}`, mb: maker?.m, isGradient };
    }

    isWork(event) {
      return event.k in this.letters;
    }

    unit(event) {
      return `${this.letters[event.k]}${event.m}${this.hasChunks ? `.${event.c}` : ""}`;
    }

    functionName(event) {
      return this.data.functions[event.f][0].split(".").at(-1);
    }

    name(event) {
      if (this.isWork(event)) return `${this.letters[event.k]}${event.m}${this.hasChunks ? say("name.chunk", { chunk: event.c }) : ""}`;
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
      return { s: event.s, l: event.l, id: event.id, parts: [{ kind: this.letters[event.k], chunk: event.c, mb: event.m }] };
    }

    held(rank) {
      let count = 0;
      return this.work(rank).map((event) => {
        const { holds } = this.kinds[this.letters[event.k]];
        return [holds > 0 ? event.s : event.s + event.l, (count += holds)];
      });
    }

    // -- Why --

    gapBefore(rank, event) {
      return this.step.ranks[rank].gaps.find((gap) => gap.b === event.i) ?? null;
    }

    // What work needs: its own stage's forward, and the maker of the message that it uses.
    needs(rank, event) {
      const own = this.kinds[this.letters[event.k]].takes === "gradient" ? [this.same(rank, event, "forward")] : [];
      return [...this.messages.filter((m) => m.b[0] === rank && m.u === event.i).map((m) => this.at([m.a[0], m.d])), ...own].filter(Boolean);
    }

    feeds(rank, event) {
      const own = event.k === "forward" ? [this.same(rank, event, "backward")] : [];
      return [...this.messages.filter((m) => m.a[0] === rank && m.d === event.i).map((m) => this.at([m.b[0], m.u])), ...own].filter(Boolean);
    }

    // Work of another kind on the same microbatch and chunk.
    same(rank, event, kind) {
      const found = this.work(rank).find((other) => other.k === kind && other.m === event.m && other.c === event.c);
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
      const work = this.step.ranks.flatMap((_, rank) => this.work(rank).filter((event) => event.m === mb)
        .map((event) => ({ kind: "work", id: event.id, rank, s: event.s, e: event.s + event.l, event })));
      const messages = this.messages.filter((m) => m.mb === mb).map((message) => ({ kind: "message", id: message.id, rank: message.a[0], s: message.a[2], e: message.b[2], message }));
      return [...work, ...messages].sort((a, b) => a.s - b.s || a.e - b.e);
    }

    get numMicrobatches() {
      return 1 + Math.max(...this.step.ranks.flatMap((_, rank) => this.work(rank).map((event) => event.m)), 0);
    }

    narrate({ kind, rank, event, message }) {
      if (kind === "message") {
        const call = this.byIndex[message.a[0]].get(message.a[1]);
        const facts = { from: message.a[0], to: message.b[0], call: call ? this.name(call) : "", start: ms(message.a[2]), end: ms(message.b[2]) };
        return { words: say(message.isGradient ? "route.gradient" : "route.activation", facts), frames: call ? this.frames(call) : null };
      }
      const gap = this.gapBefore(rank, event), chunk = this.hasChunks ? say("name.chunk", { chunk: event.c }) : "";
      const words = [say(`route.${event.k}`, { rank, start: ms(event.s), end: ms(event.s + event.l), chunk })];
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
