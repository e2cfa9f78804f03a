"use strict";
// What the player says about a piece of work, a message or a gap: what it needs, why a stage waits, which code
// runs. Reads a scene (model.js), changes nothing. Used by schedule_player.js, follow.js and predict.js.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, say = (...words) => MM.say(...words), { number, units, phase } = MM.words;
  const heading = (words) => make("h3", { "aria-level": 2 }, words);

  MM.Explanation = class Explanation {
    // `choose(id)` chooses something in the timeline; `follow(mb, scene)` starts to follow a microbatch.
    constructor({ scenes, choose, follow }) {
      Object.assign(this, { scenes, choose, follow });
    }

    // The scene that an id is of, and what it names there.
    parse(id) {
      for (const scene of this.scenes()) {
        const found = scene.find(id);
        if (found) return { scene, ...found };
      }
      return null;
    }

    // -- In a few words --

    describe(id) {
      const { scene, action, gap, message } = this.parse(id);
      if (gap) return { title: say("gap.title", { rank: gap.rank, time: units(gap.end - gap.start) }), lines: [this.gapWords(scene, gap)] };
      if (message) return { title: this.messageTitle(scene, message), lines: [this.span(message.start, message.end)] };
      return { title: scene.words(action), lines: [this.times(scene, action)] };
    }

    span(start, end) {
      return say("span", { start: number(start), end: number(end) });
    }

    times(scene, action) {
      const span = this.span(scene.step.startOf(action), scene.step.endOf(action));
      return action.phase ? `${span}, ${phase(action.phase)}` : span;
    }

    messageTitle(scene, m) {
      return say(m.activation ? "message.activation" : "message.gradient", { mb: m.mb, from: m.from, to: m.to, chunk: scene.hasChunks ? say("name.chunk", { chunk: m.chunk }) : "" });
    }

    gapWords(scene, gap) {
      const stuck = gap.before === null && scene.plan.stuck?.get(gap.rank);
      if (stuck) return say("gap.forever", { what: stuck.call ?? scene.name(stuck), messages: stuck.messages?.length ? ` (${this.messageWords(scene, stuck)})` : "" });
      if (gap.before === null) return say("gap.end", { what: scene.name(scene.at(gap.waitsFor)), rank: gap.waitsFor[0] });
      const next = scene.name(scene.plan.ranks[gap.rank][gap.before]);
      if (!gap.waitsFor) return say("gap.first", { next });
      const cause = scene.at(gap.waitsFor), what = scene.name(cause);
      if (cause.rank === gap.rank) return say("gap.own", { what, next });
      return say(scene.hasCosts ? "gap.why.message" : "gap.why", { next, what, rank: cause.rank, end: number(scene.step.endOf(cause)) });
    }

    messageWords(scene, call) {
      return call.messages.map((m) => say(m.send ? "message.sent" : "message.received",
        { what: say(m.activation ? "payload.activation" : "payload.gradient"), unit: `${m.mb}${scene.hasChunks ? `.${m.chunk}` : ""}`, peer: m.peer })).join("; ");
    }

    // While something is to be predicted: what it is and when, not what comes of it.
    shortDetails(id) {
      const { title, lines } = this.describe(id);
      return { related: new Set(), paths: null, lines: [], content: [heading(title), ...lines.map((line) => make("p", {}, line))] };
    }

    // -- For the inspector: {content, related: ids, paths, lines} --

    details(id) {
      const { scene, action, gap, message } = this.parse(id);
      return gap ? this.gapDetails(scene, gap) : message ? this.messageDetails(scene, message) : this.actionDetails(scene, action);
    }

    jump(scene, action, words = null) {
      return make("button", { type: "button", class: "mmp-link", onclick: () => this.choose(scene.idOf(action)) },
        words || say("name.on", { what: scene.name(action), rank: action.rank }));
    }

    jumps(scene, actions, none) {
      return actions.length ? actions.flatMap((other, place) => [place ? ", " : "", this.jump(scene, other), ` ${say("ends", { end: number(scene.step.endOf(other)) })}`]) : [none];
    }

    gapDetails(scene, gap) {
      const chain = scene.causalChain(gap), related = new Set(chain.slice(-2).map((action) => scene.idOf(action)));
      return { related, paths: [scene.path(chain)], lines: [], content: [
        heading(this.gapHead(scene, gap)),
        make("p", {}, this.gapWords(scene, gap), ` ${say("time.unit", { f: units(scene.step.costs.times.F[gap.rank][0]) })}`),
        gap.waitsFor ? make("p", {}, ...MM.sentence("goto", { where: this.jump(scene, scene.at(gap.waitsFor)) })) : null,
        ...this.chainList(scene, chain, gap),
        this.sourceOf(scene, chain.at(gap.before === null ? -1 : -2) ?? chain.at(-1)),
      ] };
    }

    gapHead(scene, gap) {
      const facts = { rank: gap.rank, time: units(gap.end - gap.start) }, other = gap.before === null ? null : gap.waitsFor?.[0];
      if (other === null || other === undefined || other === gap.rank) return say("gap.head", facts);
      return say("gap.head.waits", { ...facts, what: scene.name(scene.at(gap.waitsFor)), other });
    }

    // Down to the root: each could start only when the one above it had ended.
    chainList(scene, chain, gap) {
      if (chain.length < 2) return [];
      const item = (action, place) => {
        const before = chain[place - 1], isOwn = before && before.rank === action.rank;
        const why = !before ? say("chain.root") : say(isOwn ? "chain.after" : "chain.from", { what: scene.name(before), rank: before.rank });
        return make("li", {}, this.jump(scene, action), ` ${this.span(scene.step.startOf(action), scene.step.endOf(action))} `, make("span", { class: "mmp-remark" }, why));
      };
      return MM.causes(say(gap.before === null ? "chain.title.end" : "chain.title"), chain.map(item));
    }

    messageDetails(scene, m) {
      const call = scene.plan.ranks[m.from][m.sent], other = scene.plan.ranks[m.to][m.received];
      return { related: new Set(), paths: null, lines: this.lineOf(scene, m), content: [
        heading(this.messageTitle(scene, m)),
        make("p", {}, say(m.end > m.start ? "message.takes" : "message.free", { start: number(m.start), end: number(m.end) }), m.start > m.asked ? ` ${say("message.waited", { time: units(m.start - m.asked) })}` : ""),
        make("dl", { class: "mmp-facts" }, make("dt", {}, say("message.sender")), make("dd", {}, MM.code(call.call)), make("dt", {}, say("message.receiver")), make("dd", {}, MM.code(other.call))),
        this.follower(scene, m.mb), ...this.chainOfCall(scene, call),
      ] };
    }

    lineOf(scene, m) {
      return [{ a: { track: scene.track(m.from), t: m.start }, b: { track: scene.track(m.to), t: m.end } }];
    }

    actionDetails(scene, action) {
      const { step, plan } = scene, related = new Set(), lines = [];
      const needs = MM.engine.needs(plan, action), feeds = MM.engine.feeds(plan, action);
      for (const other of [...needs, ...feeds]) related.add(scene.idOf(other));
      const line = (a, b) => a.rank !== b.rank && lines.push({ a: { track: scene.track(a.rank), t: step.endOf(a) }, b: { track: scene.track(b.rank), t: step.startOf(b) } });
      needs.forEach((other) => line(other, action));
      feeds.forEach((other) => line(action, other));
      const gap = scene.gapBefore(action);
      return { related, lines, paths: null, content: [
        heading(scene.words(action)),
        make("p", {}, `${this.times(scene, action)}. `, gap ? `${say("idle.before", { time: units(gap.end - gap.start) })} ${this.gapWords(scene, gap)} ` : say("idle.none"),
          gap ? make("button", { type: "button", class: "mmp-link", onclick: () => this.choose(scene.prefix + gap.id) }, say("idle.chain")) : null),
        make("dl", { class: "mmp-facts" },
          make("dt", {}, say("needs")), make("dd", {}, ...this.jumps(scene, needs, say("needs.data"))),
          make("dt", {}, say("feeds")), make("dd", {}, ...this.jumps(scene, feeds, say("feeds.optimizer"))),
          ...this.callFacts(scene, action)),
        this.sourceOf(scene, action), this.follower(scene, MM.engine.partsOf(action)[0].mb), ...this.wholeChain(this.chainOf(scene, action)),
      ] };
    }

    follower(scene, mb) {
      return make("p", {}, make("button", { type: "button", class: "mmp-follow", onclick: () => this.follow(mb, scene) }, say("follow.start", { mb })));
    }

    // The communicator's calls on both sides of an action, with what they move.
    callFacts(scene, action) {
      const actions = scene.plan.ranks[action.rank], facts = [];
      for (const [label, call] of [["call.before", actions[action.index - 1]], ["call.after", actions[action.index + 1]]]) {
        if (call?.kind !== "C") continue;
        const [, url] = this.chainOf(scene, call)?.at(-1) ?? [], name = make("code", {}, call.call);
        facts.push(make("dt", {}, say(label)), make("dd", {}, url ? make("a", { href: MM.base + url }, name) : name, ` ${this.messageWords(scene, call) || say("call.nothing")}`));
      }
      return facts;
    }

    // -- Code --

    chainOf(scene, action) {
      const chains = MM.links.chains[scene.schedule] ?? MM.links.chains.planned;
      const keyOf = (of) => (action.kind === "C" ? `${action.call} ${of}` : `${MM.engine.partsOf(action)[0].kind} ${of}`);
      const key = keyOf(action.phase);
      return chains?.[key] ?? Object.entries(chains ?? {}).find(([name]) => name.startsWith(keyOf("")))?.[1] ?? null;
    }

    sourceOf(scene, action) {
      const chain = action && this.chainOf(scene, action);
      return chain ? MM.sourceLine(chain, MM.base) : null;
    }

    chainOfCall(scene, call) {
      const chain = this.chainOf(scene, call);
      return chain ? [MM.sourceLine(chain, MM.base), ...this.wholeChain(chain)] : [];
    }

    wholeChain(chain) {
      if (!chain) return [];
      return [make("details", { class: "mmp-whole", open: innerWidth >= 1100 }, make("summary", {}, say("chain.calls", { n: chain.length })), MM.chain(chain, MM.base))];
    }

    // -- One step of a microbatch's way --

    narrate(scene, { kind, action, message }) {
      if (kind === "message") {
        const call = scene.plan.ranks[message.from][message.sent];
        const name = `${message.activation ? "route.activation" : "route.gradient"}${message.end > message.start ? "" : ".free"}`;
        return { words: say(name, { from: message.from, to: message.to, call: call.call, start: number(message.start), end: number(message.end) }), frames: this.chainOf(scene, call) };
      }
      const gap = scene.gapBefore(action), needs = MM.engine.needs(scene.plan, action).filter((other) => other.rank !== action.rank);
      const names = MM.engine.partsOf(action).map((part) => scene.plan.kinds[part.kind].name);
      const facts = { rank: action.rank, start: number(scene.step.startOf(action)), end: number(scene.step.endOf(action)), chunk: scene.hasChunks ? say("name.chunk", { chunk: action.chunk }) : "" };
      const words = names.map((name) => say(`route.${name}`, facts));
      if (!needs.length && action.kind === "F") words.push(say("route.data"));
      if (gap) words.push(say("route.waited", { time: units(gap.end - gap.start) }));
      return { words: words.join(" "), frames: this.chainOf(scene, action) };
    }

    // -- Table --

    // The timeline as tables, one per stage.
    tables() {
      return this.scenes().flatMap((scene) => scene.step.work.map((work, rank) => {
        const { step } = scene, gaps = new Map(step.gaps[rank].map((gap) => [gap.before, gap])), last = gaps.get(null);
        const rows = work.map((a) => [number(step.startOf(a)), number(step.endOf(a)), scene.name(a), phase(a.phase), gaps.has(a.index) ? this.gapWords(scene, gaps.get(a.index)) : ""]);
        if (last) rows.push([number(last.start), number(last.end), say("legend.idle"), "", this.gapWords(scene, last)]);
        const caption = say("table.caption", { rank, idle: number(step.idle[rank]), peak: step.peaks[rank] });
        return MM.tableOf(this.scenes().length > 1 ? `${scene.title}: ${caption}` : caption, ["start", "end", "action", "phase", "idle"].map((name) => say(`table.${name}`)), rows);
      }));
    }
  };
})();
