"use strict";
// One view model for plans and runs: tracks with lanes and strips, as `draw.js` draws them, and what can be
// asked of them: why a gap is there, down to its root, and the way of one microbatch. Here: that of a plan.

(() => {
  const MM = (globalThis.MM ||= {});
  const { number } = MM.words;

  // A plan with times, under one name. `prefix` keeps the ids of two scenes of one picture apart.
  MM.Scene = class Scene {
    constructor({ plan, costs, buffered, title, schedule, prefix = "", trackOffset = 0 }) {
      Object.assign(this, { plan, title, schedule, prefix, trackOffset });
      this.step = MM.engine.simulate(plan, costs, buffered);
      this.plan = this.step.plan;
      this.v = plan.placement.stages[0].length;
      this.hasChunks = this.v > 1;
      this.hasCosts = costs.message > 0;
    }

    get p() { return this.plan.ranks.length; }

    // -- The view --

    // `lanes`: {messages: bool}, `strips`: bool, `cap` in chunks of microbatches, `notes`: bool
    tracks({ lanes = {}, cap = 0, notes = true, section = null } = {}) {
      const { step, prefix } = this, most = Math.max(...step.peaks, 0);
      const owedMost = step.owed ? Math.max(...step.owed.flat().map(([, count]) => count), 1) : 0;
      const sent = lanes.messages ? this.messagesBySender() : null;
      return step.work.map((work, rank) => ({
        rank, name: MM.say("timeline.stage", { rank }), note: notes ? MM.say("timeline.idle", { time: number(step.idle[rank]) }) : null,
        section: rank === 0 ? section : null,
        lanes: [
          { kind: "compute", bars: work.map((action) => this.bar(action)),
            gaps: step.gaps[rank].map((gap) => ({ s: gap.start, l: gap.end - gap.start, id: prefix + gap.id })) },
          ...(sent ? [{ kind: "messages", bars: sent[rank] }] : []),
        ],
        strips: [{ kind: "held", points: step.held[rank], most, cap }, ...(step.owed ? [{ kind: "owed", points: step.owed[rank], most: owedMost, cap: 0 }] : [])],
      }));
    }

    bar(action) {
      const { step, prefix } = this, s = step.startOf(action);
      return { s, l: step.endOf(action) - s, id: prefix + action.id, parts: MM.engine.partsOf(action) };
    }

    messageId(m) {
      return `${m.from}>${m.to}:${m.activation ? "F" : "B"}${m.mb}${this.hasChunks ? `.${m.chunk}` : ""}`;
    }

    messagesBySender() {
      const rows = this.plan.ranks.map(() => []);
      for (const m of this.messages()) rows[m.from].push({ s: m.start, l: m.end - m.start, id: this.prefix + m.id, label: `${m.activation ? "F" : "B"}${m.mb}`, parts: [{ kind: m.activation ? "F" : "B", mb: m.mb, chunk: m.chunk }] });
      return rows;
    }

    messages() {
      return (this.named ??= this.step.exchanged().map((m) => ({ ...m, id: this.messageId(m) })));
    }

    // -- By id --

    byId() {
      if (!this.ids) {
        this.ids = new Map();
        for (const work of this.step.work) for (const action of work) this.ids.set(action.id, { action });
        for (const gaps of this.step.gaps) for (const gap of gaps) this.ids.set(gap.id, { gap });
      }
      return this.ids;
    }

    find(id) {
      if (!id.startsWith(this.prefix)) return null;
      const own = id.slice(this.prefix.length), found = this.byId().get(own);
      if (found) return found;
      const message = own.includes(">") && this.messages().find((m) => m.id === own);
      return message ? { message } : null;
    }

    at([rank, index]) {
      return this.plan.ranks[rank][index];
    }

    idOf(action) {
      return this.prefix + action.id;
    }

    track(rank) {
      return this.trackOffset + rank;
    }

    // -- Names --

    name(part) {
      if (part.parts) return part.parts.map((each) => this.name(each)).join(" & ");
      return `${part.kind}${part.mb}${this.hasChunks ? MM.say("name.chunk", { chunk: part.chunk }) : ""}`;
    }

    words(action) {
      const kinds = MM.engine.partsOf(action).map((part) => MM.say(this.hasChunks ? "name.work.chunk" : "name.work", { kind: MM.say(`kind.${this.plan.kinds[part.kind].name}`), mb: part.mb, chunk: part.chunk }));
      return MM.say("name.at", { rank: action.rank, what: kinds.join(MM.say("name.and")) });
    }

    // -- Why --

    // From the root down to the work that ends the gap, and the gap's own stage: what waits for what.
    causalChain(gap) {
      const path = gap.waitsFor ? MM.engine.causesOf(this.step, gap.waitsFor).map((place) => this.at(place)) : [];
      return gap.before === null ? path : [...path, this.plan.ranks[gap.rank][gap.before]];
    }

    // Why this work did not start sooner: the gap before it, or null where it followed at once.
    gapBefore(action) {
      return this.step.gaps[action.rank].find((gap) => gap.before === action.index) ?? null;
    }

    path(actions) {
      return actions.map((action) => ({ track: this.track(action.rank), s: this.step.startOf(action), e: this.step.endOf(action) }));
    }

    criticalPath() {
      return this.path(MM.engine.criticalPath(this.step).map((place) => this.at(place)));
    }

    // -- One microbatch --

    has(bar, mb) {
      return bar.parts.some((part) => part.mb === mb);
    }

    // What happens to a microbatch, in order: [{kind: "work" or "message", id, rank, s, e, action or message}].
    route(mb) {
      const { step } = this;
      const work = step.work.flat().filter((action) => MM.engine.partsOf(action).some((part) => part.mb === mb))
        .map((action) => ({ kind: "work", id: this.idOf(action), rank: action.rank, s: step.startOf(action), e: step.endOf(action), action }));
      const messages = this.messages().filter((m) => m.mb === mb)
        .map((message) => ({ kind: "message", id: this.prefix + message.id, rank: message.from, s: message.start, e: message.end, message }));
      return [...work, ...messages].sort((a, b) => a.s - b.s || a.e - b.e || (a.kind === "work" ? -1 : 1) || a.rank - b.rank);
    }
  };
})();
