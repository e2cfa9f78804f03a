"use strict";
// What the player lets a reader choose: the elements, and which sizes go together. Used by
// schedule_player.js. What there are plans for is read off the keys in orders.js.

(() => {
  const MM = (globalThis.MM ||= {});
  const make = MM.make, say = (...words) => MM.say(...words);
  const ONE = "no-pipelining";

  // Sizes that were planned: schedule -> [{p, M, v, G, overlap}].
  const offered = {};
  function offers(schedule) {
    if (!MM.hasOrders(schedule)) return [];
    return (offered[schedule] ||= Object.keys(MM.orders.plans).map((key) => key.split(" ")).filter(([name]) => name === schedule)
      .map(([, p, M, v, G, overlap]) => ({ p: +p, M: +M, v: +v, G: +G, overlap: overlap ? 1 : 0 })));
  }
  const distinct = (list, name) => [...new Set(list.map((offer) => offer[name]))].sort((a, b) => a - b);
  const nearest = (values, wanted) => values.reduce((best, value) => (Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best));

  MM.schedules = () => Object.keys(MM.orders.names).filter((name) => name !== ONE);
  // The schedule whose plan is drawn: for one stage "no pipelining", unless the chosen one has a plan for it.
  MM.drawnSchedule = ({ schedule, p }) => (p > 1 || offers(schedule).some((offer) => offer.p === 1) ? schedule : ONE);
  MM.hasChunks = (schedule) => offers(schedule).some((offer) => offer.v > 1);

  // The config of a plan of another schedule with these sizes, or null: for comparing.
  MM.alike = function alike(schedule, { p, M, v, G }) {
    if (MM.drawnSchedule({ schedule, p }) === ONE) return { schedule: ONE, p, M, v: 1, G: 0, overlap: 0 };
    const list = offers(schedule).filter((offer) => offer.p === p && offer.M === M && !offer.overlap);
    if (!list.length) return null;
    const chunks = nearest(distinct(list, "v"), v > 1 ? v : 2), same = list.filter((offer) => offer.v === chunks);
    return { schedule, p, M, v: chunks, G: nearest(distinct(same, "G"), G || p), overlap: 0 };
  };

  MM.Controls = class Controls {
    // `set(key, value)` is told of every choice. `isSmall`: a few of the controls, and no more. `isFew`: p and M;
    // the player shows `rest` and `more` when a reader asks for them.
    constructor(state, set, { isSmall, isFew }) {
      this.state = state;
      this.set = set;
      const name = `mmp-${Math.random().toString(36).slice(2, 8)}`;
      this.schedules = make("fieldset", { class: "mmp-segments" }, make("legend", { class: "mmp-hidden" }, say("control.schedule")),
        ...MM.schedules().map((value) => make("label", {},
          make("input", { type: "radio", name, value, onchange: () => set("schedule", value) }), make("span", {}, MM.orders.names[value]))));
      this.fields = {
        p: this.slider("p", () => distinct(this.offersNow(), "p")),
        M: this.slider("M", () => distinct(this.offersNow().filter((o) => o.p === this.state.p && o.v === this.state.v), "M")),
        v: this.choice("v"),
        G: this.choice("G"),
      };
      this.compare = make("select", { onchange: () => set("vs", this.compare.value) }, make("option", { value: "" }, say("control.vs.none")),
        ...MM.schedules().map((value) => make("option", { value }, MM.orders.names[value])));
      const comparison = isSmall ? null : MM.field(say("control.vs"), this.compare);
      comparison?.classList.add("mmp-spoiler");
      const [p, M, ...chunks] = ["p", "M", "v", "G"].map((key) => this.fields[key].element), row = (...parts) => make("div", { class: "mmp-controls" }, ...parts);
      this.element = isFew ? row(p, M) : row(this.schedules, p, M, ...chunks, comparison);
      this.rest = isFew ? row(this.schedules, ...chunks, comparison) : null;
      this.balance = make("div", { class: "mmp-balance", role: "group", "aria-label": say("control.balance") });
      this.more = isSmall ? null : this.buildMore();
    }

    // -- Elements --

    buildMore() {
      const { set } = this;
      this.overlap = this.flag("overlap");
      this.link = this.select("link", [["both", say("control.link.both")], ["buffered", say("control.link.buffered")]]);
      this.pair = this.select("pair", [["sum", say("control.pair.sum")], ["max", say("control.pair.max")]]);
      this.messages = this.flag("messages");
      this.split = make("div", { class: "mmp-grid" }, this.number("bi"), this.number("bw"), MM.field(say("control.pair"), this.pair));
      return make("details", { class: "mmp-more" }, make("summary", {}, say("control.more")),
        make("div", { class: "mmp-grid" }, this.number("f", "f"), this.number("b", "b"), this.number("c", null, "0.05"),
          MM.field(say("control.link"), this.link), this.number("cap", null, "1"),
          this.messages.element, this.overlap.element),
        this.split, this.balance);
    }

    flag(key) {
      const input = make("input", { type: "checkbox", onchange: () => this.set(key, input.checked ? 1 : 0) });
      return { input, element: make("label", { class: "mmp-switch" }, input, ` ${say(`control.${key}`)}`) };
    }

    select(key, options) {
      const select = make("select", { onchange: () => this.set(key, select.value) }, ...options.map(([value, words]) => make("option", { value }, words)));
      return select;
    }

    number(key, letter = null, step = "0.25") {
      const isOptional = ["cap", "bi", "bw"].includes(key), rule = MM.PlayerState.RULES[key];
      const fault = make("small", { class: "mmp-fault", role: "status" });
      const input = make("input", { type: "number", min: rule.min, max: rule.max, step, inputmode: "decimal", oninput: () => {
        const isEmpty = isOptional && input.value === "" && !input.validity.badInput;
        try {
          const value = isEmpty ? 0 : MM.check.number(rule)(input.value);
          fault.textContent = "";
          this.set(key, value);
        } catch (error) {
          fault.textContent = say("control.fault", { why: error.message, value: isOptional ? this.state[key] || "—" : this.state[key] });
        }
        input.setAttribute("aria-invalid", String(fault.textContent !== ""));
      } });
      this.fields[key] = { show: () => {
        if (key === "bi" || key === "bw") input.placeholder = this.state.b / 2; // half of a backward, unless said otherwise
        if (document.activeElement === input) return;
        input.value = isOptional && !this.state[key] ? "" : this.state[key];
        fault.textContent = "";
        input.setAttribute("aria-invalid", "false");
      } };
      const field = MM.field(say(`control.${key}`), input, letter);
      field.append(fault);
      return field;
    }

    // A slider over the values that there are plans for.
    slider(key, values) {
      const input = make("input", { type: "range", min: 0, step: 1, oninput: () => this.set(key, values()[input.value]) });
      const output = make("b", {});
      return { element: make("label", { class: "mmp-field mmp-range" }, make("span", {}, say(`control.${key}`), make("var", {}, ` ${key}`), " ", output), input),
        show: () => {
          const list = values();
          input.max = list.length - 1;
          input.value = list.indexOf(this.state[key]);
          input.setAttribute("aria-valuetext", String(this.state[key]));
          output.textContent = this.state[key];
        } };
    }

    choice(key) {
      const select = make("select", { onchange: () => this.set(key, Number(select.value)) });
      const element = MM.field(say(`control.${key}`), select, key);
      return { element, show: () => {
        const { state } = this, list = distinct(this.offersNow().filter((o) => o.p === state.p && (key === "v" || (o.v === state.v && o.M === state.M))), key);
        element.hidden = !MM.hasChunks(state.schedule) || state.p === 1 || list.length < 2;
        select.replaceChildren(...list.map((value) => make("option", { value, selected: value === state[key] }, String(value))));
      } };
    }

    // -- What goes together --

    offersNow() {
      const { schedule } = this.state;
      return [...(MM.drawnSchedule({ schedule, p: 1 }) === ONE ? offers(ONE) : []), ...offers(schedule)];
    }

    // Moves the sizes to the nearest ones that the planner has a plan for. Returns words on what moved.
    // `asked`: what an address has asked for; of the rest, a reader who changes one size does not hear.
    settle(asked = {}) {
      const { state } = this, moved = [];
      let list = this.offersNow();
      const keep = (key, isTold = key in asked) => {
        const values = distinct(list, key), value = nearest(values, state[key]);
        if (value !== state[key] && isTold) moved.push(say("control.moved", { name: say(`control.${key}`), asked: state[key], value }));
        state[key] = value;
        list = list.filter((offer) => offer[key] === value);
      };
      keep("p", true);
      const isLooped = MM.hasChunks(state.schedule) && state.p > 1;
      if (!isLooped) {
        if ((state.v > 1 && "v" in asked) || (state.overlap && "overlap" in asked)) moved.push(say("control.one", { name: MM.orders.names[state.schedule] }));
        Object.assign(state, { v: 1, G: 0, overlap: 0 });
      }
      if (state.balance && state.balance.split(",").length !== state.p) {
        moved.push(say("control.balance.length", { n: state.balance.split(",").length, p: state.p }));
        state.balance = "";
      }
      keep("v");
      keep("M", true);
      if (isLooped && !state.G) state.G = state.p;
      keep("G");
      this.canOverlap = list.some((offer) => offer.overlap);
      keep("overlap");
      return moved.join(" ");
    }

    // One factor per stage.
    factors() {
      const given = this.state.balance.split(",").map(Number);
      return Array.from({ length: this.state.p }, (_, rank) => (given[rank] > 0 ? given[rank] : 1));
    }

    // -- Showing --

    // `plan`: what is shown; its kinds of work decide which times there are to choose.
    show({ letters, hasPairs }) {
      const { state } = this;
      for (const field of Object.values(this.fields)) field.show();
      for (const radio of this.schedules.querySelectorAll("input")) radio.checked = radio.value === state.schedule;
      if (!this.more) return;
      this.overlap.input.checked = Boolean(state.overlap);
      this.overlap.element.hidden = !this.canOverlap;
      this.messages.input.checked = Boolean(state.messages);
      const [input, weight, pair] = this.split.children;
      input.hidden = weight.hidden = !letters.includes("I");
      pair.hidden = !hasPairs;
      this.split.hidden = input.hidden && pair.hidden;
      Object.assign(this.link, { value: state.link });
      Object.assign(this.pair, { value: state.pair });
      Object.assign(this.compare, { value: state.vs });
      const factors = this.factors();
      if (this.balance.childElementCount !== state.p + 1)
        this.balance.replaceChildren(make("span", {}, say("control.balance")), ...factors.map((_, rank) => this.share(rank)));
      [...this.balance.querySelectorAll("label")].forEach((label, rank) => {
        label.firstChild.value = factors[rank];
        label.firstChild.setAttribute("aria-valuetext", say("control.times", { factor: factors[rank] }));
        label.lastChild.textContent = `${rank}: ×${factors[rank]}`;
      });
    }

    share(rank) {
      const input = make("input", { type: "range", min: "0.25", max: "2", step: "0.25", "aria-label": say("control.work", { rank }), oninput: () => {
        const now = this.factors();
        now[rank] = Number(input.value);
        this.set("balance", now.every((factor) => factor === 1) ? "" : now.join(","));
      } });
      return make("label", {}, input, make("output", {}));
    }
  };
})();
