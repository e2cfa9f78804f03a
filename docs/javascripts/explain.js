"use strict";
// What the player says about one action or one gap: what it needs, why a stage waits, which code runs.
// Used by schedule_player.js; reads the player's plan and times, changes nothing.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, { number } = MM.words;
  const PHASES = { warmup: "warm-up", steady: "steady state", cooldown: "cool-down" };
  const phaseWords = ({ phase }) => (phase in PHASES ? `, ${PHASES[phase]}` : ""); // a reader's own schedule may name none
  const KINDS = { F: "forward", B: "backward" };

  MM.Explanation = class Explanation {
    constructor(player) {
      this.player = player;
    }

    get state() { return this.player.state; }
    get plan() { return this.player.plan; }
    get step() { return this.player.step; }
    get schedule() { return this.player.schedule; }
    get timeline() { return this.player.timeline; }

    nameOf({ kind, mb, chunk }) {
      return `${kind}${mb}${this.state.v > 1 ? ` of chunk ${chunk}` : ""}`;
    }

    parse(id) {
      const [rank, rest] = id.split(":");
      return rest[0] === "g" ? { gap: this.step.gaps[rank][Number(rest.slice(1))] } : { action: this.plan.ranks[rank][Number(rest)] };
    }

    describe(id) {
      const { action, gap } = this.parse(id);
      if (gap) return { title: `Stage ${gap.rank} idle for ${number(gap.end - gap.start)}`, lines: [this.gapWords(gap)] };
      const { step } = this, words = `Stage ${action.rank}: ${KINDS[action.kind]} of microbatch ${action.mb}`;
      return { title: words + (this.state.v > 1 ? `, chunk ${action.chunk}` : ""),
        lines: [`${number(step.startOf(action))} to ${number(step.endOf(action))}${phaseWords(action)}`] };
    }

    gapWords(gap) {
      const stuck = gap.before === null && this.step.plan.stuck?.get(gap.rank);
      if (stuck) return `It waits for ever in ${stuck.call ?? this.nameOf(stuck)}${stuck.messages?.length ? ` (${this.messageWords(stuck)})` : ""}.`;
      if (gap.before === null) return `Its work is done; the step ends with ${this.nameOf(this.plan.ranks[gap.waitsFor[0]][gap.waitsFor[1]])} on stage ${gap.waitsFor[0]}.`;
      const next = this.nameOf(this.plan.ranks[gap.rank][gap.before]);
      if (!gap.waitsFor) return `Until the first message arrives, for ${next}.`;
      const [rank, index] = gap.waitsFor, cause = this.nameOf(this.plan.ranks[rank][index]);
      if (rank === gap.rank) return `For messages, between its own ${cause} and ${next}.`;
      const message = this.state.c ? " and the message" : "";
      return `Before ${next}: waiting for ${cause} on stage ${rank}, which ends at ${number(this.step.ends[rank][index])}${message}.`;
    }

    jump(place, words = null) {
      const action = Array.isArray(place) ? this.plan.ranks[place[0]][place[1]] : place;
      return make("button", { type: "button", class: "mmp-link", onclick: () => this.timeline.choose(`${action.rank}:${action.index}`) },
        words || `${this.nameOf(action)} on stage ${action.rank}`);
    }

    gapDetails(gap, related) {
      if (gap.waitsFor) related.add(gap.waitsFor.join(":"));
      if (gap.before !== null) related.add(`${gap.rank}:${gap.before}`);
      return [make("h3", {}, `Stage ${gap.rank} computes nothing for ${number(gap.end - gap.start)}`), make("p", {}, this.gapWords(gap)),
        gap.waitsFor ? make("p", {}, "Go to ", this.jump(gap.waitsFor)) : null].filter(Boolean);
    }

    actionDetails(action, related, lines) {
      const { step, plan } = this, { config } = plan;
      const link = (list) => list.map((what) => MM.engine.find(step, what)).filter(Boolean);
      const needs = link(MM.engine.needs(config, action)), users = link(MM.engine.neededBy(config, action));
      for (const other of [...needs, ...users]) related.add(`${other.rank}:${other.index}`);
      for (const other of needs) if (other.rank !== action.rank) lines.push({ a: { rank: other.rank, t: step.endOf(other) }, b: { rank: action.rank, t: step.startOf(action) } });
      for (const other of users) if (other.rank !== action.rank) lines.push({ a: { rank: action.rank, t: step.endOf(action) }, b: { rank: other.rank, t: step.startOf(other) } });
      const items = (list, none) => (list.length ? list.flatMap((other, place) => [place ? ", " : "", this.jump(other), ` (ends ${number(step.endOf(other))})`]) : [none]);
      const gap = step.gaps[action.rank].find((found) => found.before === action.index);
      const chain = this.chainOf(action);
      return [
        make("h3", {}, this.describe(`${action.rank}:${action.index}`).title),
        make("p", {}, `${number(step.startOf(action))} to ${number(step.endOf(action))}${phaseWords(action)}. `, gap ? `Idle before it for ${number(gap.end - gap.start)}. ${this.gapWords(gap)}` : ""),
        make("div", { class: "mmp-split" },
          make("dl", { class: "mmp-facts" },
            make("dt", {}, "Needs"), make("dd", {}, ...items(needs, "data only")),
            make("dt", {}, "Needed by"), make("dd", {}, ...items(users, "the optimizer step")),
            ...this.callFacts(action)),
          chain ? make("div", {}, make("p", { class: "mmp-head" }, "Call chain, into the annotated source"), MM.chain(chain, MM.base)) : null),
      ];
    }

    // The communicator's calls on both sides of an action, with what they move.
    callFacts(action) {
      const actions = this.plan.ranks[action.rank], facts = [];
      for (const [label, call] of [["Call before", actions[action.index - 1]], ["Call after", actions[action.index + 1]]]) {
        if (call?.kind !== "C") continue;
        const chain = MM.links.chains[this.schedule]?.[`${call.call} ${call.phase}`];
        const [, url] = chain?.at(-1) ?? [];
        const name = make("code", {}, call.call);
        facts.push(make("dt", {}, label), make("dd", {}, url ? make("a", { href: MM.base + url }, name) : name, ` ${this.messageWords(call) || "nothing to move here"}`));
      }
      return facts;
    }

    messageWords(call) {
      return call.messages.map((m) =>
        `${m.activation ? "activation" : "gradient"} of ${m.mb}${this.state.v > 1 ? `.${m.chunk}` : ""} ${m.send ? "→" : "←"} stage ${m.peer}`).join("; ");
    }

    chainOf(action) {
      const chains = MM.links.chains[this.schedule];
      return chains?.[`${action.kind} ${action.phase}`] || Object.entries(chains || {}).find(([key]) => key.startsWith(`${action.kind} `))?.[1];
    }

    // -- Table --

    // The timeline as tables, one per stage.
    tables() {
      const { step } = this;
      return step.work.map((work, rank) => {
        const gaps = new Map(step.gaps[rank].map((gap) => [gap.before, gap]));
        const last = gaps.get(null);
        const row = (cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
        const rows = work.map((a) => row([number(step.startOf(a)), number(step.endOf(a)), this.nameOf(a), PHASES[a.phase] ?? "",
          gaps.has(a.index) ? this.gapWords(gaps.get(a.index)) : ""]));
        if (last) rows.push(row([number(last.start), number(last.end), "idle", "", this.gapWords(last)]));
        return make("table", {}, make("caption", {}, `Stage ${rank}: idle ${number(step.idle[rank])}, peak in flight ${step.peaks[rank]}`),
          make("thead", {}, make("tr", {}, ...["start", "end", "action", "phase", "idle before it"].map((words) => make("th", { scope: "col" }, words)))),
          make("tbody", {}, ...rows));
      });
    }
  };
})();
