"use strict";
// What the replay says about a recorded call, a message or a gap. Reads a scene (recorded_model.js), changes
// nothing; explain.js says the same of a plan.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, say = (...words) => MM.say(...words), ms = MM.milliseconds;

  MM.RecordedExplanation = class RecordedExplanation {
    // `scene()` is the step that is shown; `choose(id)` and `follow(mb)` change what is.
    constructor({ scene, choose, follow }) {
      Object.defineProperty(this, "scene", { get: scene });
      Object.assign(this, { choose, follow });
    }

    describe(id) {
      const { rank, event, gap, message } = this.scene.find(id);
      if (gap) return { title: say("gap.title", { rank, time: ms(gap.l) }), lines: [gap.words] };
      if (message) return { title: message.x, lines: [say("span", { start: ms(message.a[2]), end: ms(message.b[2]) })] };
      const span = say("span", { start: ms(event.s), end: ms(event.s + event.l) });
      return { title: say("name.at", { rank, what: this.scene.name(event) }), lines: [`${span}: ${ms(event.l)}${event.ph ? `, ${MM.words.phase(event.ph)}` : ""}`] };
    }

    // For the inspector.
    details({ rank, event, gap, message }) {
      return gap ? this.gapDetails(rank, gap) : message ? this.messageDetails(message) : this.callDetails(rank, event);
    }

    jump({ rank, event }) {
      return make("button", { type: "button", class: "mmp-link", onclick: () => this.choose(event.id) }, say("name.on", { what: this.scene.name(event), rank }));
    }

    gapDetails(rank, gap) {
      const chain = this.scene.causalChain({ rank, gap }), cause = chain.at(gap.b === null ? -1 : -2);
      const items = chain.map((at) => make("li", {}, this.jump(at), ` ${say("span", { start: ms(at.event.s), end: ms(at.event.s + at.event.l) })}`));
      return [make("h3", { "aria-level": 2 }, say("gap.head", { rank, time: ms(gap.l) })), make("p", {}, `${gap.words}.`),
        gap.f && cause ? make("p", {}, ...MM.sentence("goto", { where: this.jump(cause) })) : null,
        ...(chain.length > 1 ? MM.causes(say("chain.title"), items) : []), cause ? MM.sourceLine(this.scene.frames(cause.event), MM.base) : null];
    }

    callDetails(rank, event) {
      const [name, url] = this.scene.data.functions[event.f], isWork = this.scene.isWork(event), frames = this.scene.frames(event);
      const words = [say("replay.length", { length: ms(event.l), start: ms(event.s) }), MM.words.phase(event.ph), event.w || event.t ? say("replay.waited", { wait: ms(event.w || 0), transfer: ms(event.t || 0) }) : null].filter(Boolean);
      const gap = this.scene.gapBefore(rank, event), link = url ? make("a", { href: MM.base + url }, MM.code(name)) : MM.code(name);
      return [make("h3", { "aria-level": 2 }, ...MM.sentence("replay.head", { rank, call: link }), isWork ? `: ${this.scene.name(event)}` : ""),
        make("p", {}, `${words.join(", ")}.`), gap ? make("p", {}, `${gap.words}. `, make("button", { type: "button", class: "mmp-link", onclick: () => this.choose(gap.id) }, say("idle.chain"))) : null,
        isWork ? this.edges(rank, event) : null,
        ...(event.x || []).map((word) => make("p", {}, this.scene.data.words[word])), MM.sourceLine(frames, MM.base),
        this.unrolled(rank, event), isWork ? this.follower(event.m) : null, this.wholeChain(frames)];
    }

    // The same call in the step that was recorded line by line.
    unrolled(rank, event) {
      const { data, step } = this.scene;
      if (!data.unrolled || event.u === undefined) return null;
      const place = { rank: step.ranks[rank].rank, ...(event.m === undefined ? {} : { microbatch: event.m }), call: event.u };
      const href = `${MM.base}${data.unrolled}#${new URLSearchParams(place)}`;
      return make("p", {}, make("a", { href }, say("replay.unrolled")));
    }

    // What work needed, and what needed it: as of a plan, from the messages that were really sent.
    edges(rank, event) {
      const jumps = (list, none) => (list.length ? list.flatMap((at, place) => [place ? ", " : "", this.jump(at)]) : [none]);
      return make("dl", { class: "mmp-facts" }, make("dt", {}, say("needs")), make("dd", {}, ...jumps(this.scene.needs(rank, event), say("needs.data"))),
        make("dt", {}, say("feeds")), make("dd", {}, ...jumps(this.scene.feeds(rank, event), say("feeds.optimizer"))));
    }

    follower(mb) {
      return make("p", {}, make("button", { type: "button", class: "mmp-follow", onclick: () => this.follow(mb) }, say("follow.start", { mb })));
    }

    wholeChain(frames) {
      return make("details", { class: "mmp-whole", open: innerWidth >= 1100 }, make("summary", {}, say("chain.calls", { n: frames.length })), MM.chain(frames, MM.base));
    }

    messageDetails(message) {
      const [from, to] = [message.a, message.b].map(([rank, index]) => this.scene.at([rank, index])), frames = from ? this.scene.frames(from.event) : null;
      return [make("h3", { "aria-level": 2 }, say("replay.message", { what: message.x, from: message.a[0], to: message.b[0] })), make("p", {}, say("message.takes", { start: ms(message.a[2]), end: ms(message.b[2]) })),
        make("dl", { class: "mmp-facts" }, ...[["message.sender", from], ["message.receiver", to]].filter(([, at]) => at).flatMap(([name, at]) => [make("dt", {}, say(name)), make("dd", {}, this.jump(at))])),
        ...(frames ? [MM.sourceLine(frames, MM.base), message.mb === undefined ? null : this.follower(message.mb), this.wholeChain(frames)] : [])];
    }
  };
})();
