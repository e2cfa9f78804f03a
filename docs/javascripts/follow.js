"use strict";
// Follows one microbatch through a step: F, send, F, ..., B, W; for each a line of words and the line of
// source that runs. The same for a plan and for a recorded run.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;
  const SECONDS = 1.6;

  MM.Follow = class Follow {
    // `scene`: route(mb), has(bar, mb), track(rank); `narrate(step)` -> {words, frames}; `numbers`: how many
    // microbatches there are; `show(step, content, words)` puts a step on the screen; `ended()` when it is over.
    constructor({ scene, numbers, narrate, show, ended }) {
      Object.assign(this, { scene, numbers, narrate, show, ended });
    }

    begin(mb, place = 0) {
      this.mb = mb;
      this.hasBegun = false;
      this.route = this.scene.route(mb);
      this.go(place);
    }

    // Whether a key was one of those that go along the way.
    key(key) {
      const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[key];
      if (steps) this.move(steps);
      return Boolean(steps);
    }

    // One on or one back, by a key or a button outside.
    move(steps) {
      this.stop();
      this.go(this.place + steps);
    }

    go(place) {
      this.place = Math.max(0, Math.min(place, this.route.length - 1));
      const step = this.route[this.place];
      if (!step) return;
      const told = this.narrate(step);
      this.show(step, this.content(told), told.words);
    }

    content({ words, frames }) {
      const isLast = this.place === this.route.length - 1;
      const button = (name, act, disabled = false, words = name) => make("button", { type: "button", "data-name": name, disabled, onclick: act }, MM.say(`follow.${words}`));
      const select = make("select", { "data-name": "mb", onchange: () => { this.stop(); this.begin(Number(select.value)); } },
        ...Array.from({ length: this.numbers }, (_, mb) => make("option", { value: mb, selected: mb === this.mb }, String(mb))));
      return [
        make("div", { class: "mmp-followhead" }, MM.field(MM.say("follow.mb"), select), make("b", {}, MM.say("follow.place", { place: this.place + 1, n: this.route.length }))),
        make("p", { class: "mmp-narration" }, words),
        frames ? MM.sourceLine(frames, MM.base) : null,
        make("div", { class: "mmp-tools" }, button("back", () => this.move(-1), this.place === 0),
          button("on", () => this.move(1), isLast), button("run", () => this.toggle(), false, this.timer ? "stop" : "run"), button("end", () => this.end())),
      ];
    }

    toggle() {
      if (this.timer) this.stop();
      else {
        if (this.place === this.route.length - 1) this.place = -1;
        this.timer = setInterval(() => {
          if (this.place >= this.route.length - 1) this.stop();
          else this.place++;
          this.go(this.place);
        }, 1000 * SECONDS);
        this.place++;
      }
      this.go(this.place);
    }

    stop() {
      clearInterval(this.timer);
      this.timer = null;
    }

    end() {
      this.stop();
      this.ended();
    }

    // Puts content into the inspector. The focus stays on the button that it was on, or goes to its neighbour;
    // at first to the one that is `wanted`.
    fill(inspector, content, wanted) {
      const { body } = inspector, own = body.contains(document.activeElement) && document.activeElement.dataset.name;
      const held = own || (this.hasBegun ? null : wanted);
      this.hasBegun = true;
      inspector.show(...content);
      const named = (name) => body.querySelector(`[data-name=${name}]:not(:disabled)`);
      if (held) (named(held) ?? named("back") ?? named("on"))?.focus({ preventScroll: true });
    }

    isFaded(bar) {
      return !this.scene.has(bar, this.mb);
    }
  };
})();
