"use strict";
(() => {
  // ---- words, numbers and elements. Everything that comes from the server goes through textContent. ----
  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const whole = new Intl.NumberFormat("en");
  const brief = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
  const REASONS = {
    no_checkpoint: "no checkpoint", evicted: "evicted", in_progress: "in progress", preempted: "preempted",
    too_short: "too short", namespace: "other namespace", remote_failed: "transfer failed", tier_failed: "tier failed",
    tier_slow: "tier slower", disabled: "cache off", rewritten: "answer rewritten", never_seen: "never seen", none: "nothing lost",
  };
  const tint = (reason) => (reason === "never_seen" ? "var(--new)" : reason === "none" ? "var(--hit)" : `var(--${reason})`);
  const known = (reason) => (reason in REASONS ? reason : "never_seen");

  function make(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  }
  function draw(parent, tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }
  function size(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
    return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[unit]}`;
  }
  function ago(seconds) {
    if (seconds < 1.5) return "now";
    if (seconds < 90) return `${Math.round(seconds)} s ago`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
    return `${Math.round(seconds / 3600)} h ago`;
  }
  const percent = (part, of) => (of ? `${((100 * part) / of).toFixed(1)} %` : "–");
  const space = (number) => (number ? `salted namespace #${number}` : "");
  const sum = (object) => Object.values(object).reduce((a, b) => a + b, 0);
  const many = (count, one, more) => `${whole.format(count)} ${count === 1 ? one : more || one + "s"}`;

  // ---- asking the server ----
  const EVERY = 2000, LONGEST = 60000;
  let key = null, paused = false, wait = EVERY, timer = 0, asking = false, latest = null;

  function say(text, kind) {
    if ($("status").textContent !== text) $("status").textContent = text;
    $("status").className = kind || "";
  }
  async function ask() {
    clearTimeout(timer);
    if (asking || paused || document.hidden) return;
    asking = true;
    try {
      const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
      const address = new URL("../cache", location.href.replace(/\/?([?#].*)?$/, ""));
      const answer = await fetch(address, { headers, cache: "no-store", signal: AbortSignal.timeout(90000) });
      if (answer.status === 401) return askForKey();
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      latest = await answer.json();
      wait = EVERY;
      $("login").hidden = true;
      $("main").hidden = false;
      if (!paused) say("live", "live");
      showAll();
    } catch (error) {
      wait = Math.min(LONGEST, wait * 2);
      say(`no answer, next try in ${Math.round(wait / 1000)} s`, "wrong");
    } finally {
      asking = false;
    }
    timer = setTimeout(ask, wait);
  }
  function askForKey() {
    $("refused").textContent = key === null ? "" : "The server does not take this key.";
    key = null;
    $("main").hidden = true;
    $("login").hidden = false;
    say("waiting for a key");
    $("key").focus();
  }
  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = $("key").value.trim();
    $("key").value = "";
    if (!/^[\x21-\x7e]+$/.test(typed)) { $("refused").textContent = "A key has visible ASCII characters only."; return; }
    key = typed;
    ask();
  });
  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    $("pause").textContent = paused ? "Resume" : "Pause";
    if (paused) { clearTimeout(timer); say("paused"); } else { wait = EVERY; say("connecting"); ask(); }
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });

  // ---- the parts of the page ----
  function showAll() {
    const { server, pool, tree } = latest;
    $("model").textContent = server.model;
    $("setup").textContent = `${server.mamba_cache_mode} placement${server.exact ? ", exact" : ""} · pages of ` +
      `${server.block_size} tokens, ${size(pool.page_bytes)} · a checkpoint takes ${size(server.checkpoint_bytes)}` +
      (server.window_bytes ? `, and its windows ${size(server.window_bytes)}` : "");
    showSummary();
    showPool(pool);
    $("stones").textContent = brief.format(tree.checkpoints);
    $("stones-note").textContent = `${size(tree.checkpoint_bytes)}, ${many(tree.hits, "hit")}`;
    showDrafts(latest.spec_decode);
    showTime();
    showTree();
    showPolicy();
    showQueue();
    showLost();
    showVisits();
  }
  function showDrafts(drafts) {
    $("drafts-card").hidden = !drafts;
    if (!drafts) return;
    $("drafts").textContent = percent(drafts.num_accepted_tokens, drafts.num_draft_tokens);
    $("drafts-note").textContent = `${brief.format(drafts.num_accepted_tokens)} of ` +
      `${many(drafts.num_draft_tokens, "token")} in ${many(drafts.num_drafts, "draft")} since the start`;
  }
  function showSummary() {
    const total = { prompt: 0, hit: 0, received: 0, requests: 0 };
    for (const part of latest.history) for (const name in total) total[name] += part[name];
    $("rate").textContent = percent(total.hit + total.received, total.prompt);
    const others = total.received ? `, ${brief.format(total.received)} from other servers` : "";
    $("rate-note").textContent = `${brief.format(total.hit)} of ${brief.format(total.prompt)} tokens in ` +
      `${many(total.requests, "request")} of the last hour${others}`;
  }
  function showPool(pool) {
    const parts = [
      ["requests", "running requests", pool.held_by_requests], ["transfers", "other servers", pool.held_by_transfers],
      ["steps", "steps under way", pool.held_by_steps], ["cached", "cache alone", pool.cached_pages],
      ["free", "free", pool.free_pages],
    ];
    $("pool").replaceChildren();
    $("pool-key").replaceChildren();
    for (const [name, label, pages] of parts) {
      if (pages && name !== "free") segment($("pool"), pages / pool.pages, `var(--${name})`);
      if (!pages && (name === "transfers" || name === "steps")) continue;
      const entry = make("li", `${label} ${size(pages * pool.page_bytes)}`);
      entry.style.setProperty("--tint", `var(--${name})`);
      $("pool-key").append(entry);
    }
    $("pool").setAttribute("role", "img");
    $("pool").setAttribute("aria-label", parts.map(([, label, pages]) => `${label}: ${percent(pages, pool.pages)}`).join(", "));
  }
  function segment(bar, share, colour, title) {
    const part = make("i");
    part.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    part.style.background = colour;
    if (title) part.title = title;
    bar.append(part);
  }

  // ---- hit and miss over time ----
  function showTime() {
    const box = $("time"), width = Math.max(260, box.clientWidth - 20), height = 150, floor = height - 20;
    const history = latest.history, span = history.length ? Math.max(600, history[0].age) : 600;
    const step = history.length ? history[history.length - 1].seconds : 10;
    const slots = Math.min(Math.floor(width / 3), Math.ceil(span / step) + 1), slot = span / slots;
    const bins = Array.from({ length: slots }, () => ({ prompt: 0, hit: 0, received: 0, lost: {} }));
    for (const part of history) {
      const bin = bins[Math.max(0, Math.min(slots - 1, slots - 1 - Math.floor(part.age / slot)))];
      bin.prompt += part.prompt; bin.hit += part.hit; bin.received += part.received;
      for (const [reason, tokens] of Object.entries(part.lost)) {
        bin.lost[known(reason)] = (bin.lost[known(reason)] || 0) + tokens;
      }
    }
    const top = Math.max(1, ...bins.map((bin) => bin.prompt)), totals = {};
    const svg = draw(null, "svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    for (const share of [0.5, 1]) {
      const y = floor - share * (floor - 14);
      draw(svg, "line", { class: "grid", x1: 0, x2: width, y1: y, y2: y });
      draw(svg, "text", { x: 0, y: y - 3 }, `${brief.format(top * share)} tokens`);
    }
    bins.forEach((bin, index) => {
      let y = floor;
      const stack = (name, tokens, colour) => {
        if (!tokens) return;
        const high = (tokens / top) * (floor - 14);
        y -= high;
        totals[name] = (totals[name] || 0) + tokens;
        const bar = draw(svg, "rect", { x: (index * width) / slots, y, width: Math.max(1, width / slots - 1), height: high });
        bar.style.fill = colour;
      };
      stack("hit", bin.hit, "var(--hit)");
      stack("received", bin.received, "var(--received)");
      for (const reason of Object.keys(REASONS)) stack(reason, bin.lost[reason], tint(reason));
    });
    draw(svg, "line", { class: "grid", x1: 0, x2: width, y1: floor, y2: floor });
    draw(svg, "text", { x: 0, y: height - 5 }, ago(span));
    draw(svg, "text", { x: width, y: height - 5, "text-anchor": "end" }, "now");
    const words = { hit: "cached", received: "from other servers", ...REASONS };
    $("time-key").replaceChildren();
    for (const name of Object.keys(words)) {
      if (!totals[name]) continue;
      const entry = make("li", `${words[name]} ${brief.format(totals[name])}`);
      entry.style.setProperty("--tint", name in REASONS ? tint(name) : `var(--${name})`);
      $("time-key").append(entry);
    }
    svg.setAttribute("aria-label", `Prompt tokens over the last ${ago(span).replace(" ago", "")}: ` +
      Object.keys(words).filter((name) => totals[name]).map((name) => `${words[name]} ${whole.format(totals[name])}`).join(", "));
    $("time-note").textContent = "Prompt tokens by where they came from, and why the others had to be computed.";
    box.replaceChildren(svg);
  }

  // ---- the tree: every path a line on one axis of tokens, checkpoints as cairns along it ----
  const ROW = 54, OPEN_ROWS = 40;
  const opened = new Map();  // what the user has opened (true) or closed (false), by name
  let root = null, chosen = null, zoom = 1;

  const STOPS = [[112, 124, 142], [74, 138, 143], [98, 161, 78], [221, 160, 38], [208, 80, 38]];
  function colour(share) {
    const place = Math.max(0, Math.min(0.9999, share)) * (STOPS.length - 1), low = Math.floor(place), part = place - low;
    return `rgb(${STOPS[low].map((value, i) => Math.round(value + (STOPS[low + 1][i] - value) * part)).join(",")})`;
  }
  function layOut() {
    const paths = latest.paths, below = paths.map(() => []), tops = [];
    paths.forEach((path, index) => (path.parent === null ? tops : below[path.parent]).push(index));
    const heavy = (a, b) => weight(b) - weight(a);
    // as the engine weighs them: bytes from here down, a hit for as much as a checkpoint
    const weights = paths.map((path) => path.bytes + path.more.bytes + sumOf(path.checkpoints, "bytes") + path.below.bytes +
      latest.server.checkpoint_bytes * (sumOf(path.checkpoints, "hits") + path.more.hits + path.below.hits));
    for (let index = paths.length - 1; index >= 0; index -= 1) {
      if (paths[index].parent !== null) weights[paths[index].parent] += weights[index];
    }
    const weight = (index) => weights[index];
    below.forEach((list) => list.sort(heavy));
    tops.sort(heavy);
    let first = root === null ? -1 : paths.findIndex((path) => path.name === root);
    if (root !== null && first < 0) root = null;
    const starts = first >= 0 ? [first] : tops;
    // open as many as fit, the shallow ones first; what the user has said goes before
    const open = new Set(), queue = [...starts];
    let rows = starts.length;
    while (queue.length) {
      const index = queue.shift(), said = opened.get(paths[index].name);
      const fits = rows + below[index].length <= OPEN_ROWS || index === first;
      if (said === false || (said === undefined && !fits) || !below[index].length) continue;
      open.add(index);
      rows += below[index].length;
      queue.push(...below[index]);
    }
    const list = [], stack = starts.map((index) => [index, 1]).reverse();
    while (stack.length) {
      const [index, level] = stack.pop();
      list.push({ index, level, open: open.has(index), children: below[index].length });
      if (open.has(index)) stack.push(...below[index].map((child) => [child, level + 1]).reverse());
    }
    return list;
  }
  function showTree() {
    const { tree, paths } = latest;
    const rest = tree.paths - paths.length, out = rest ? ` The other ${whole.format(rest)} are counted where they hang.` : "";
    $("tree-note").textContent = `${many(tree.nodes, "node")} in ${many(tree.paths, "path")}, ${brief.format(tree.tokens)} tokens; ` +
      `${rest ? `the ${whole.format(paths.length)} heaviest` : "all"} are shown.${out} ` + (tree.dropped_tokens
        ? `${brief.format(tree.dropped_tokens)} tokens were dropped and are only remembered (dotted).` : "");
    const box = $("tree-box"), list = layOut();
    const active = document.activeElement, hadFocus = box.contains(active), scroll = [box.scrollLeft, box.scrollTop];
    if (!list.length) { box.replaceChildren(make("p", "Nothing is cached yet.", "small")); return; }
    const width = Math.max(280, box.clientWidth - 10) * zoom, left = 18, right = 16;
    const from = Math.min(...list.map((row) => paths[row.index].start));
    const to = Math.max(from + 64, ...list.map((row) => paths[row.index].end));
    const x = (token) => left + ((token - from) / (to - from)) * (width - left - right);
    const height = 26 + list.length * ROW;
    const svg = draw(null, "svg", { height, role: "tree", "aria-label": "Cached paths" });
    svg.style.width = `${width}px`;
    axis(svg, x, from, to, width, height);
    const rowOf = new Map(list.map((row, place) => [row.index, place]));
    for (const [index, place] of rowOf) {
      const parent = paths[index].parent;
      if (parent === null || !rowOf.has(parent)) continue;
      const at = x(paths[index].start), y1 = 26 + rowOf.get(parent) * ROW + 42, y2 = 26 + place * ROW + 42;
      draw(svg, "path", { class: "fork", d: `M${at} ${y1}V${y2 - 6}q0 6 6 6` });
    }
    const best = Math.max(1e-9, ...paths.flatMap((path) => path.checkpoints.map((stone) => stone.value)));
    if (!list.some((row) => paths[row.index].name === chosen)) chosen = null;
    list.forEach((row, place) => drawRow(svg, row, place, x, width, best, place === 0));
    box.replaceChildren(svg);
    [box.scrollLeft, box.scrollTop] = scroll;
    if (hadFocus) focusRow(chosen);
    treeKey();
  }
  function axis(svg, x, from, to, width, height) {
    const rough = (to - from) / Math.max(3, Math.floor(width / 90)), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    for (let token = Math.ceil(from / step) * step; token <= to; token += step) {
      draw(svg, "line", { class: "grid", x1: x(token), x2: x(token), y1: 18, y2: height });
      draw(svg, "text", { x: x(token), y: 12, "text-anchor": x(token) > width - 30 ? "end" : "middle" }, brief.format(token));
    }
  }
  function describe(path) {
    const parts = [];
    if (path.namespace) parts.push(space(path.namespace));
    parts.push(`${whole.format(path.start)}–${whole.format(path.end)}`);
    parts.push(path.resident ? size(path.bytes) : "dropped");
    if (path.users) parts.push(many(path.users, "request") + " here");
    if (path.below.paths) parts.push(`+${many(path.below.paths, "path")}, ${size(path.below.bytes)}`);
    return parts.join(" · ");
  }
  function drawRow(svg, row, place, x, width, best, isFirst) {
    const path = latest.paths[row.index], y = 26 + place * ROW, line = y + 42;
    const stones = path.checkpoints.length + path.more.checkpoints;
    const group = draw(svg, "g", {
      class: `row${path.name === chosen ? " chosen" : ""}`, role: "treeitem", "aria-level": row.level,
      tabindex: (chosen === null ? isFirst : path.name === chosen) ? 0 : -1, "data-name": path.name,
      "aria-label": `tokens ${describe(path)}, ${many(stones, "checkpoint")}`,
    });
    if (row.children) group.setAttribute("aria-expanded", String(row.open));
    draw(group, "rect", { x: 1, y: y + 1, width: width - 2, height: ROW - 2, rx: 6 });
    const x1 = x(path.start), x2 = Math.max(x1 + 2, x(path.end));
    draw(group, "line", { class: `trail${path.resident ? "" : " gone"}`, x1, x2, y1: line, y2: line });
    const words = describe(path), wide = words.length * 6.4 + 16;
    const at = Math.max(4, Math.min(x1 - 4, width - wide));
    if (row.children) {
      const toggle = draw(group, "path", { class: "toggle", d: row.open ? `M${at} ${y + 7}h9l-4.5 7z` : `M${at + 1} ${y + 5}v9l7 -4.5z` });
      toggle.dataset.toggle = "1";
    }
    draw(group, "text", { class: "name", x: at + (row.children ? 14 : 0), y: y + 14 }, words);
    drawStones(group, path, x, line, best);
    if (path.below.paths) draw(group, "path", { class: "fork", d: `M${x2} ${line}l8 -5M${x2} ${line}l9 0M${x2} ${line}l8 5` });
  }
  function drawStones(group, path, x, line, best) {
    // what would stand on one another's feet becomes one cairn
    const piles = [], badges = [];
    for (const stone of path.checkpoints) {
      const at = x(stone.position), last = piles[piles.length - 1];
      if (last && at - last.at < 20) last.stones.push(stone); else piles.push({ at, stones: [stone] });
    }
    for (const pile of piles) {
      pile.at = x(pile.stones.reduce((one, two) => (two.value > one.value ? two : one)).position);
      const bytes = sumOf(pile.stones, "bytes"), hits = sumOf(pile.stones, "hits");
      const value = Math.max(...pile.stones.map((stone) => stone.value));
      const held = pile.stones.some((stone) => stone.held), probation = pile.stones.every((stone) => stone.probation);
      const cairn = draw(group, "g", { class: `cairn${held ? " held" : ""}${probation ? " probation" : ""}` });
      const shade = colour(Math.log1p(value) / Math.log1p(best));
      const top = pileOf(cairn, pile.at, line - 2, bytes, shade);
      if (hits) badges.push([pile.at + 9, top, hits]);
      draw(cairn, "title", {}, pile.stones.map(stoneWords).join("\n"));
    }
    for (const [at, top, hits] of badges) badge(group, at, top, hits);
  }
  const sumOf = (list, name) => list.reduce((total, item) => total + item[name], 0);
  function pileOf(parent, at, line, bytes, shade) {
    const count = Math.max(2, Math.min(5, Math.round(Math.log10(Math.max(1, bytes)) - 4)));
    let y = line, half = 5 + count * 1.4;
    for (let stone = 0; stone < count; stone += 1) {
      const ellipse = draw(parent, "ellipse", { class: "stone", cx: at + [0, 0.8, -0.6, 0.4, 0][stone], cy: y - 2.8, rx: half, ry: 3 });
      ellipse.style.fill = shade;
      y -= 4.6;
      half *= 0.75;
    }
    return y;
  }
  function badge(parent, at, y, hits) {
    const text = hits > 999 ? brief.format(hits) : String(hits), wide = 7 + text.length * 6;
    draw(parent, "rect", { class: "badge", x: at - 4, y: y - 6, width: wide, height: 13, rx: 6.5 });
    draw(parent, "text", { x: at - 4 + wide / 2, y: y + 4, "text-anchor": "middle" }, text);
  }
  function stoneWords(stone) {
    const held = stone.held ? ", held for a client" : stone.probation ? ", on probation" : "";
    return `${stone.kind.replace("_", " ")} at ${whole.format(stone.position)}: ${size(stone.bytes)}, ${many(stone.hits, "hit")}, ` +
      `saves ${whole.format(stone.saved_tokens)} tokens, ${brief.format(stone.value)} tokens per MiB${held}`;
  }
  function treeKey() {
    const list = $("tree-key");
    if (list.childElementCount) return;
    const example = (text, paint) => {
      const entry = make("li", undefined, "plain"), svg = draw(null, "svg", { width: 76, height: 32, "aria-hidden": "true" });
      paint(svg);
      entry.append(svg, ` ${text}`);
      list.append(entry);
    };
    example("higher: more bytes", (svg) => { pileOf(svg, 20, 27, 1e6, colour(0.4)); pileOf(svg, 52, 27, 1e10, colour(0.4)); });
    example("value: tokens saved × uses per byte", (svg) => [0, 0.25, 0.5, 0.75, 1].forEach((share, i) => {
      const box = draw(svg, "rect", { x: 2 + i * 14, y: 12, width: 14, height: 12 });
      box.style.fill = colour(share);
    }));
    example("hits", (svg) => { pileOf(svg, 26, 27, 1e7, colour(0.7)); badge(svg, 38, 14, 12); });
  }
  function tell(path) {
    const words = [`Tokens ${describe(path)}.`, ...path.checkpoints.map((stone) => `${stoneWords(stone)}.`)];
    if (path.more.checkpoints) words.push(`${many(path.more.checkpoints, "more checkpoint")}, ${size(path.more.bytes)}, ${many(path.more.hits, "hit")}.`);
    $("detail").textContent = words.join(" ");
  }
  const byName = (name) => latest.paths.find((path) => path.name === name);
  const rows = () => [...$("tree-box").querySelectorAll(".row")];
  function focusRow(name) {
    const all = rows(), row = all.find((one) => one.dataset.name === name) || all[0];
    if (row) row.focus({ preventScroll: false });
  }
  function choose(name) {
    chosen = name;
    const path = byName(name);
    if (path) tell(path);
    showTree();
    focusRow(name);
  }
  function toggle(name, open) { opened.set(name, open); choose(name); }
  const isOpen = (row) => row.getAttribute("aria-expanded");
  $("tree-box").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    const name = row.dataset.name, state = isOpen(row);
    if (state !== null && (event.target.dataset.toggle || name === chosen)) toggle(name, state !== "true");
    else choose(name);
  });
  $("tree-box").addEventListener("dblclick", (event) => {
    const row = event.target.closest(".row");
    if (row) look(row.dataset.name);
  });
  $("tree-box").addEventListener("keydown", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    const all = rows(), place = all.indexOf(row), name = row.dataset.name, state = isOpen(row);
    const move = (to) => { if (all[to]) choose(all[to].dataset.name); };
    const parent = () => {
      const above = all.slice(0, place).reverse().find((one) => +one.getAttribute("aria-level") < +row.getAttribute("aria-level"));
      if (above) choose(above.dataset.name);
    };
    const acts = {
      ArrowDown: () => move(place + 1), ArrowUp: () => move(place - 1), Home: () => move(0), End: () => move(all.length - 1),
      ArrowRight: () => (state === "false" ? toggle(name, true) : state === "true" && move(place + 1)),
      ArrowLeft: () => (state === "true" ? toggle(name, false) : parent()),
      Enter: () => look(name), " ": () => state !== null && toggle(name, state !== "true"), Escape: () => look(null),
    };
    if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
  });
  function look(name) {
    root = name;
    zoom = 1;
    if (name === null) showTree(); else { opened.set(name, true); choose(name); }
  }
  function setZoom(factor) { zoom = Math.max(1, Math.min(32, zoom * factor)); showTree(); }
  $("zoom-in").addEventListener("click", () => setZoom(2));
  $("zoom-out").addEventListener("click", () => setZoom(0.5));
  $("whole").addEventListener("click", () => { opened.clear(); look(null); });
  $("expand").addEventListener("click", () => { for (const path of latest.paths) opened.set(path.name, true); showTree(); });
  $("collapse").addEventListener("click", () => { for (const path of latest.paths) opened.set(path.name, false); root = null; showTree(); });

  // ---- lists ----
  function reasonWord(reason) {
    const word = make("span", REASONS[known(reason)], "reason");
    word.style.setProperty("--tint", tint(known(reason)));
    return word;
  }
  function showPolicy() {
    const { price, kinds } = latest.policy;
    $("policy-note").textContent = price === null
      ? "Nothing would go for a new checkpoint now."
      : `What goes next is expected to save ${brief.format(price)} tokens in the next 1,000 requests for each MiB.`;
    $("policy").replaceChildren(...kinds.map((row) => {
      const item = make("li"), left = make("div"), rest = make("div");
      left.append(make("strong", whole.format(row.earned_tokens)), make("span", " tokens saved"));
      rest.textContent = `${whole.format(row.present)} of ${whole.format(row.taken)} taken are there, expected to save ` +
        `${brief.format(row.expected_tokens)} tokens in the next 1,000 requests; ${many(row.used, "hit")} so far`;
      item.append(left, make("span", row.kind.replaceAll("_", " ")), rest);
      return item;
    }));
  }
  const AWAITED = { turn: "its turn", prefix: "what another request computes", pages: "pages from elsewhere", lease: "room among the leases" };
  function showQueue() {
    const { policy, waiting, bypasses, requests } = latest.queue;
    $("queue-note").textContent = (waiting
      ? `${many(waiting, "request")} waiting${waiting > requests.length ? `, the first ${requests.length} of them here` : ""}. `
      : "Nobody waits. ") + `Policy ${policy}; requests went before earlier ones ${whole.format(bypasses)} times so far.`;
    $("queue").replaceChildren(...requests.map((row) => {
      const item = make("li"), left = make("div"), rest = make("div");
      left.append(make("strong", whole.format(row.hit)), make("span", ` of ${whole.format(row.prompt)} tokens to hit`));
      const kept = row.kept_bytes ? `${size(row.kept_bytes)} kept for it${row.endangered ? ", which would go before its turn" : ""}; ` : "";
      rest.textContent = `${kept}a ${row.session} session, waiting for ${row.age.toFixed(1)} s` +
        (row.bypassed ? `, bypassed by ${many(row.bypassed, "other")}` : "") +
        (row.priority ? `, priority ${whole.format(row.priority)}` : "");
      item.append(left, make("span", `waits for ${AWAITED[row.waits_for] || "its turn"}`), rest);
      return item;
    }));
  }
  function showLost() {
    $("lost-note").textContent = latest.lost.length
      ? "Tokens that had been seen before and were computed again, by the prefix that they belong to."
      : "No prefix has been computed twice so far.";
    $("lost").replaceChildren(...latest.lost.map((prefix) => {
      const item = make("li"), left = make("div"), rest = make("div");
      left.append(make("strong", whole.format(prefix.tokens)), make("span", " tokens"));
      rest.append(make("strong", "Cure: "), document.createTextNode(prefix.cure), document.createElement("br"));
      const place = space(prefix.namespace);
      rest.append(make("span", `up to token ${whole.format(prefix.depth)} of prefix ${prefix.name}${place ? `, ${place}` : ""}, ` +
        `${many(prefix.requests, "request")}, ${ago(prefix.age)} `));
      if (latest.paths.some((path) => path.name === prefix.name)) {
        const button = make("button", "Show");
        button.type = "button";
        button.setAttribute("aria-label", `Show prefix ${prefix.name} in the tree`);
        button.addEventListener("click", () => { reveal(prefix.name); });
        rest.append(button);
      }
      item.append(left, reasonWord(prefix.reason), rest);
      return item;
    }));
  }
  function reveal(name) {
    root = null;
    for (let path = byName(name); path && path.parent !== null;) {
      path = latest.paths[path.parent];
      opened.set(path.name, true);
    }
    choose(name);
    $("tree-title").scrollIntoView();
  }
  let shown = 20;
  $("more").addEventListener("click", () => { shown += 60; showVisits(); });
  function showVisits() {
    const visits = latest.visits.slice(0, shown), longest = Math.max(1, ...visits.map((visit) => visit.prompt));
    $("more").hidden = latest.visits.length <= shown;
    $("visits").replaceChildren(...visits.map((visit) => {
      const item = make("li"), left = make("div"), scale = make("div", undefined, "scale"), bar = make("div", undefined, "bar");
      const place = space(visit.namespace);
      left.append(make("strong", `#${whole.format(visit.number)}`), make("span", ` ${ago(visit.age)}${place ? `, ${place}` : ""}`),
        document.createElement("br"), make("span", `${whole.format(visit.hit + visit.received)} of ${whole.format(visit.prompt)} tokens`));
      segment(bar, visit.hit / longest, "var(--hit)", `cached: ${whole.format(visit.hit)}`);
      if (visit.received) segment(bar, visit.received / longest, "var(--received)", `received: ${whole.format(visit.received)}`);
      for (const [reason, tokens] of Object.entries(visit.lost)) {
        segment(bar, tokens / longest, tint(known(reason)), `${REASONS[known(reason)]}: ${whole.format(tokens)}`);
      }
      const matched = make("div", undefined, "matched");
      matched.style.width = `${(visit.matched / longest) * 100}%`;
      matched.title = `matched: ${whole.format(visit.matched)}`;
      scale.setAttribute("role", "img");
      scale.setAttribute("aria-label", `cached ${whole.format(visit.hit)}, matched ${whole.format(visit.matched)}, prompt ${whole.format(visit.prompt)} tokens`);
      scale.append(bar, matched);
      item.append(left, scale, reasonWord(visit.reason));
      return item;
    }));
  }
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => { if (latest) { showTime(); showTree(); } }, 150);
  });
  ask();
})();
