"use strict";
// What the player lets a reader choose: the elements, and which sizes go together. Used by
// schedule_player.js. What there are plans for is read off the keys in orders.js.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make;
  const SCHEDULES = [["gpipe", "GPipe"], ["1f1b", "1F1B"], ["interleaved", "Interleaved"]];

  // Sizes that were planned: schedule -> [{p, M, v, G, overlap}].
  const offered = {};
  function offers(schedule) {
    return (offered[schedule] ||= Object.keys(MM.orders.plans).map((key) => key.split(" ")).filter(([name]) => name === schedule)
      .map(([, p, M, v, G, overlap]) => ({ p: +p, M: +M, v: +v, G: +G, overlap: overlap ? 1 : 0 })));
  }
  const distinct = (list, name) => [...new Set(list.map((offer) => offer[name]))].sort((a, b) => a - b);
  const nearest = (values, wanted) => values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best));

  MM.Controls = class Controls {
    // `set(key, value)` is told of every choice.
    constructor(state, set) {
      this.state = state;
      this.set = set;
      const name = `mmp-${Math.random().toString(36).slice(2, 8)}`;
      this.schedules = make("fieldset", { class: "mmp-segments" }, make("legend", { class: "mmp-hidden" }, "Schedule"),
        ...SCHEDULES.map(([value, words]) => make("label", {},
          make("input", { type: "radio", name, value, onchange: () => set("schedule", value) }), make("span", {}, words))));
      this.fields = {
        p: this.slider("Stages", "p", () => distinct(this.offersNow(), "p")),
        M: this.slider("Microbatches", "M", () => distinct(this.offersNow().filter((o) => o.p === this.state.p && o.v === this.state.v), "M")),
        v: this.choice("Chunks per stage", "v"),
        G: this.choice("Group", "G"),
      };
      this.element = make("div", { class: "mmp-controls" }, this.schedules,
        ...["p", "M", "v", "G"].map((key) => this.fields[key].element));
      this.balance = make("div", { class: "mmp-balance", role: "group", "aria-label": "Work per stage" });
      this.more = this.buildMore();
    }

    static knows(schedule) {
      return SCHEDULES.some(([name]) => name === schedule);
    }

    // -- Elements --

    buildMore() {
      const { set } = this;
      this.overlap = make("input", { type: "checkbox", onchange: () => set("overlap", this.overlap.checked ? 1 : 0) });
      this.overlapField = make("label", { class: "mmp-switch" }, this.overlap, " messages travel while stages compute");
      this.link = make("select", { onchange: () => set("link", this.link.value) },
        make("option", { value: "both" }, "both ends wait (NCCL)"), make("option", { value: "buffered" }, "sends do not wait (gloo)"));
      return make("details", { class: "mmp-more" }, make("summary", {}, "Times, balance, memory"),
        make("div", { class: "mmp-grid" }, this.number("Forward", "f", "f"), this.number("Backward", "b", "b"), this.number("Message", "c", null, "0.05"),
          make("label", { class: "mmp-field" }, make("span", {}, "Links"), this.link),
          this.number("Memory cap, microbatches", "cap", null, "1"), this.overlapField),
        this.balance);
    }

    number(label, key, letter, step = "0.25") {
      const input = make("input", { type: "number", min: "0", step, inputmode: "decimal", oninput: () => this.set(key, Math.max(0, Number(input.value) || 0)) });
      this.fields[key] = { show: () => { if (document.activeElement !== input) input.value = key === "cap" && !this.state.cap ? "" : this.state[key]; } };
      return make("label", { class: "mmp-field" }, make("span", {}, label, letter ? make("var", {}, ` ${letter}`) : null), input);
    }

    // A slider over the values that there are plans for.
    slider(label, key, values) {
      const input = make("input", { type: "range", min: 0, step: 1, oninput: () => this.set(key, values()[input.value]) });
      const output = make("b", {});
      return { element: make("label", { class: "mmp-field mmp-range" }, make("span", {}, label, make("var", {}, ` ${key}`), " ", output), input),
        show: () => {
          const list = values();
          input.max = list.length - 1;
          input.value = list.indexOf(this.state[key]);
          input.setAttribute("aria-valuetext", String(this.state[key]));
          output.textContent = this.state[key];
        } };
    }

    choice(label, key) {
      const select = make("select", { onchange: () => this.set(key, Number(select.value)) });
      const element = make("label", { class: "mmp-field" }, make("span", {}, label, make("var", {}, ` ${key}`)), select);
      return { element, show: () => {
        const { state } = this, isOn = state.schedule === "interleaved";
        element.hidden = !isOn;
        if (!isOn) return;
        const list = this.offersNow().filter((o) => o.p === state.p && (key === "v" || (o.v === state.v && o.M === state.M)));
        select.replaceChildren(...distinct(list, key).map((value) => make("option", { value, selected: value === state[key] }, String(value))));
      } };
    }

    // -- What goes together --

    offersNow() {
      const list = offers(this.state.schedule);
      return this.state.schedule === "interleaved" ? list : [...offers("no-pipelining"), ...list];
    }

    // Moves the sizes to the nearest ones that the planner has a plan for. Returns words on what moved.
    settle() {
      const { state } = this, moved = [];
      const keep = (key, list) => {
        const value = nearest(list, state[key]);
        if (value !== state[key] && key === "M") moved.push(`M is ${value}: the planner has no such plan for ${state[key]}`);
        state[key] = value;
      };
      let list = this.offersNow();
      const isInterleaved = state.schedule === "interleaved";
      keep("p", distinct(list, "p"));
      list = list.filter((offer) => offer.p === state.p);
      if (!isInterleaved) Object.assign(state, { v: 1, G: 0, overlap: 0 });
      keep("v", distinct(list, "v"));
      list = list.filter((offer) => offer.v === state.v);
      keep("M", distinct(list, "M"));
      list = list.filter((offer) => offer.M === state.M);
      if (isInterleaved && !state.G) state.G = state.p;
      keep("G", distinct(list, "G"));
      list = list.filter((offer) => offer.G === state.G);
      keep("overlap", distinct(list, "overlap"));
      this.canOverlap = list.some((offer) => offer.overlap);
      return moved.join(". ");
    }

    // One factor per stage.
    factors() {
      const given = this.state.balance.split(",").map(Number);
      return Array.from({ length: this.state.p }, (_, rank) => (given[rank] > 0 ? given[rank] : 1));
    }

    // -- Showing --

    show() {
      const { state } = this;
      for (const field of Object.values(this.fields)) field.show();
      for (const radio of this.schedules.querySelectorAll("input")) radio.checked = radio.value === state.schedule;
      this.overlap.checked = Boolean(state.overlap);
      this.overlapField.hidden = !this.canOverlap;
      this.link.value = state.link;
      const factors = this.factors();
      if (this.balance.childElementCount !== state.p + 1)
        this.balance.replaceChildren(make("span", {}, "Work per stage"), ...factors.map((_, rank) => this.share(rank)));
      [...this.balance.querySelectorAll("label")].forEach((label, rank) => {
        label.firstChild.value = factors[rank];
        label.firstChild.setAttribute("aria-valuetext", `${factors[rank]} times`);
        label.lastChild.textContent = `${rank}: ×${factors[rank]}`;
      });
    }

    share(rank) {
      const input = make("input", { type: "range", min: "0.25", max: "2", step: "0.25", "aria-label": `Work of stage ${rank}`, oninput: () => {
        const now = this.factors();
        now[rank] = Number(input.value);
        this.set("balance", now.every((factor) => factor === 1) ? "" : now.join(","));
      } });
      return make("label", {}, input, make("output", {}));
    }
  };
})();
