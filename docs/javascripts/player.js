"use strict";
// The only script that a page names for players and replays. Where the page has a `.mm-player` or a
// `.mm-replay`, it loads the others from its own folder, then mounts them. No fetch, no module: all of it works
// from file://.
//
//   <div class="mm-player" data-schedule="1f1b" data-pp="4" data-microbatches="8"></div>
//       and: data-vpp, data-group, data-forward, data-backward, data-message, data-cap, data-predict,
//       data-compare="gpipe", data-small (fewer controls, answers inside), data-few (p and M, the rest behind More), data-choose="gap" (the first one)
//   <div class="mm-replay" data-recording="1f1b-paced"></div>
//
// What stands inside such an element (a picture, a sentence) is shown until it is mounted, and where
// scripts do not run. Each has its own part of the address (address.js).

(() => {
  const MM = (globalThis.MM ||= {});
  const here = document.currentScript.src.replace(/[^/]*$/, "");
  MM.base = here.replace(/javascripts\/$/, "");

  const loaded = {};
  MM.load = (path) =>
    (loaded[path] ||= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = MM.base + path;
      script.async = false;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${path} did not load`));
      document.head.append(script);
    }));

  // Schedules with chunks have many plans; they are loaded when somebody wants to see one.
  const late = {}, there = new Set();
  MM.hasOrders = (schedule) => !MM.orders.late.includes(schedule) || there.has(schedule);
  MM.needOrders = (schedule) => {
    if (MM.hasOrders(schedule)) return Promise.resolve();
    return (late[schedule] ||= MM.load(`javascripts/orders_${schedule}.js`).then(async () => {
      MM.engine.merge(MM.orders, await MM.engine.unpack(MM.packed[`orders_${schedule}`]));
      there.add(schedule);
    }));
  };

  function addStyle() {
    if (document.querySelector('link[href*="stylesheets/player.css"]')) return null;
    return new Promise((resolve) => {
      const link = document.createElement("link");
      Object.assign(link, { rel: "stylesheet", href: MM.base + "stylesheets/player.css", onload: resolve, onerror: resolve });
      document.head.append(link);
    });
  }

  async function mount() {
    const elements = [...document.querySelectorAll(".mm-player, .mm-replay")];
    if (!elements.length) return;
    const replays = elements.some((element) => element.matches(".mm-replay"));
    const players = elements.some((element) => element.matches(".mm-player"));
    const files = ["elements.js", "engine.js", "painters.js", "draw.js", "timeline.js", "inspector.js", "follow.js", "links.js"];
    if (!MM.say) files.unshift("words.js", "say.js", "address.js"); // a page of the site has them already
    if (players) files.push("orders.js", "model.js", "explain.js", "controls.js", "figures.js", "player_state.js", "schedule_player.js");
    if (replays) files.push("recorded_words.js", "recorded_model.js", "recorded_explain.js", "replay.js");
    await Promise.all([addStyle(), ...files.map((name) => MM.load(`javascripts/${name}`))]);
    MM.links = await MM.engine.unpack(MM.packed.links);
    if (players) MM.orders = await MM.engine.unpack(MM.packed.orders);
    for (const [number, element] of elements.entries()) {
      const options = { ...element.dataset, isFirst: number === 0 };
      const show = element.matches(".mm-player") ? MM.mountPlayer : MM.mountReplay;
      try {
        await show(element, options);
        element.dataset.ready = "";
      } catch (error) {
        console.error(error);
        element.append(MM.say("player.failed", { why: error.message }));
      }
    }
  }

  if (document.readyState === "loading") addEventListener("DOMContentLoaded", mount);
  else mount();
})();
