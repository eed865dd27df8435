// Keeps a page up to date, draws its charts, and sorts and filters its tables. The page
// works without it, as it was when it was loaded.
"use strict";
(() => {
  const style = (name) => { // a colour as it is now: light-dark() is for style sheets alone
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
  };
  const PARTS = ["access", "broker", "consumer"]; // as in a row of samples, from its 8th column
  const HUES = [210, 30, 130, 280, 0, 180, 330, 60, 240, 90];
  const source = new URL("../data", document.currentScript.src).href; // also where a proxy serves the pages below a prefix
  const topics = new Map(); // name -> {brokers, samples, slo}
  const charts = [];
  const shown = { quantile: 1, span: 900, log: false, zoom: null }; // of all charts; span in seconds, zoom [from, to]

  const number = (v) => (v == null ? "–" : v === 0 ? "0" : v >= 1000 ? Math.round(v).toLocaleString("en").replaceAll(",", "\u202f") : String(Number(v.toPrecision(3))));
  const two = (n) => String(n).padStart(2, "0");
  const clock = (s, fine) => {
    const d = new Date(s * 1000);
    return two(d.getUTCHours()) + ":" + two(d.getUTCMinutes()) + (fine ? ":" + two(d.getUTCSeconds()) : "");
  };

  class Chart {
    constructor(box) {
      this.box = box;
      this.topic = box.dataset.topic;
      this.kind = box.dataset.chart;
      this.plot = null;
      this.drawn = "";
    }
    lines() { // [name, colour, value of a row]
      const at = (i) => (row) => row[i] ?? null;
      const slo = topics.get(this.topic).slo;
      switch (this.kind) {
        case "delays":
          return PARTS.map((name, i) => [name, style("--" + name), at(7 + 3 * i + shown.quantile)])
            .concat(slo ? [["SLO", style("--bad"), () => slo]] : []);
        case "delivery":
          return ["p50", "p99", "p99.9"].map((name, i) => [name, style("--" + PARTS[i]), at(16 + i)]);
        case "rates":
          return [["offered", style("--access"), at(1)], ["released", style("--broker"), at(2)], ["delivered", style("--consumer"), at(3)]];
        case "backlog":
          return [["messages", style("--access"), at(5)]];
        default: {
          const [red, green, blue] = style("--back").match(/[0-9.]+/g).map(Number);
          const light = red + green + blue < 384 ? 65 : 38;
          const unit = this.kind === "loops" ? 100 : 1; // percent of a part
          return topics.get(this.topic).brokers.map((name, i) => [name, `hsl(${HUES[i % HUES.length]} 70% ${light}%)`, (row) => (row[19 + i] == null ? null : unit * row[19 + i])]);
        }
      }
    }
    // top is the largest value that is shown, among the charts of the page that share a scale.
    top() {
      return Math.max(...charts.filter((c) => c === this || this.box.dataset.scale && c.box.dataset.scale === this.box.dataset.scale).map((c) => c.highest ?? 0));
    }
    draw() {
      const known = topics.get(this.topic);
      if (!known || known.samples.length < 2) return;
      const lines = this.lines();
      const newest = known.samples.at(-1)[0] / 1000;
      const [from, to] = shown.zoom ?? [Math.max(newest - shown.span, known.samples[0][0] / 1000), newest];
      const rows = known.samples.filter((row) => row[0] >= from * 1000 - 5000 && row[0] <= to * 1000 + 5000);
      const data = [rows.map((row) => row[0] / 1000), ...lines.map((l) => rows.map((row) => { const v = l[2](row); return shown.log && !(v > 0) ? null : v; }))];
      this.highest = data.slice(1).flat().reduce((most, v) => Math.max(most, v ?? 0), 0);
      this.last = lines.map((l) => l[2](known.samples.at(-1)));
      const shape = lines.map((l) => l[0] + l[1]).join() + style("--faint") + shown.log;
      const width = Math.max(200, this.box.clientWidth);
      if (this.plot && this.drawn === shape) {
        if (this.plot.width !== width) this.plot.setSize({ width, height: 200 });
        this.plot.batch(() => { this.plot.setData(data, false); this.plot.setScale("x", { min: from, max: Math.max(to, from + 1) }); });
        if (this.plot.cursor.idx == null) this.plot.setLegend({ idx: null }); // the newest values
        return;
      }
      this.plot?.destroy();
      this.drawn = shape;
      const axis = { stroke: style("--faint"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
      const range = shown.log
        ? (u, low, high) => uPlot.rangeLog(Math.max(low ?? 0.1, 1e-3), Math.max(this.top(), high ?? 1, 1e-2), 10, true)
        : () => [0, Math.max(this.top() * 1.08, { delays: 0.1, delivery: 0.1 }[this.kind] ?? 1)];
      this.plot = new uPlot({
        width, height: 200, cursor: { drag: { x: true, y: false, setScale: false } },
        scales: { x: { range: (u, low, high) => [low, high] }, y: { distr: shown.log ? 3 : 1, range } },
        axes: [
          { ...axis, space: 80, values: (u, at, i, space, step) => at.map((s) => clock(s, step < 60)) },
          { ...axis, size: (u, labels) => Math.max(58, 18 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length))), values: (u, at) => at.map((v) => (v == null ? "" : number(v))) },
        ],
        series: [{ label: "UTC", value: (u, v) => clock(v ?? this.at(), true) }, ...lines.map(([label, stroke], i) => ({
          label, stroke, width: 1.5, dash: label === "SLO" ? [6, 4] : i % 3 === 1 ? [8, 2] : undefined, points: { show: false },
          value: (u, v, k, at) => number(at == null ? this.last[k - 1] : v), // without a mouse, the newest
        }))],
        hooks: {
          setSelect: [(u) => {
            if (u.select.width < 4) return;
            shown.zoom = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            redraw();
          }],
          ready: [(u) => u.over.addEventListener("dblclick", () => { shown.zoom = null; redraw(); })],
        },
      }, data, this.box);
      this.plot.setScale("x", { min: from, max: Math.max(to, from + 1) });
      this.box.dataset.drawn = "true";
    }
    at() { return (topics.get(this.topic)?.samples.at(-1)?.[0] ?? 0) / 1000; }
  }

  function redraw() {
    charts.forEach((c) => c.draw());
    if (charts.some((c) => c.box.dataset.scale)) charts.forEach((c) => c.draw()); // now that each knows its largest value
    document.querySelectorAll("[data-zoom]").forEach((b) => { b.hidden = !shown.zoom; });
  }

  function take(rows) {
    const known = topics.get(rows.topic) ?? { brokers: [], samples: [] };
    known.brokers = rows.brokers;
    known.slo = rows.slo;
    const last = known.samples.at(-1)?.[0] ?? 0;
    known.samples.push(...rows.samples.filter((row) => row[0] > last));
    const newest = known.samples.at(-1)?.[0] ?? 0;
    while (known.samples.length && known.samples[0][0] < newest - 3600e3) known.samples.shift();
    topics.set(rows.topic, known);
    charts.filter((c) => c.topic === rows.topic).forEach((c) => c.draw());
  }

  // Tables: sorted and filters are what the reader has chosen, by the name of a table. Each
  // update is arranged so before it is shown.
  const sorted = new Map(); // name -> [column, descending]
  const filters = new Map(); // name -> text
  const nameOf = (table) => table.closest(".scroll")?.getAttribute("aria-label") ?? "";
  const valueOf = (row, column) => {
    const cell = row.children[column];
    const text = (cell?.dataset.value ?? cell?.textContent ?? "").trim();
    const n = parseFloat(text.replaceAll("\u202f", ""));
    return [Number.isNaN(n) || !cell.classList.contains("n") ? null : n, text];
  };
  function arrange(root) {
    for (const table of root.querySelectorAll("table")) {
      const chosen = sorted.get(nameOf(table));
      if (chosen && table.tBodies[0]) {
        const [column, descending] = chosen;
        const rows = [...table.tBodies[0].rows].map((row) => [row, valueOf(row, column)]);
        rows.sort(([, a], [, b]) => (descending ? -1 : 1) * (a[0] != null && b[0] != null ? a[0] - b[0] : a[1].localeCompare(b[1])));
        table.tBodies[0].append(...rows.map(([row]) => row));
        [...table.tHead.rows[0].cells].forEach((th, i) => { if (th.querySelector("button")) th.setAttribute("aria-sort", i !== column ? "none" : descending ? "descending" : "ascending"); });
      }
    }
    for (const input of root.querySelectorAll("input[data-filter]")) {
      const text = filters.get(input.dataset.filter) ?? "";
      input.setAttribute("value", text);
      const region = [...root.querySelectorAll(".scroll")].find((r) => r.getAttribute("aria-label") === input.dataset.filter);
      for (const row of region?.querySelectorAll("tbody tr") ?? []) row.hidden = !row.textContent.toLowerCase().includes(text.toLowerCase());
    }
  }
  document.addEventListener("click", (e) => {
    const th = e.target.closest("thead th");
    const table = th?.closest("table");
    if (!th?.querySelector("button") || !nameOf(table)) return;
    const [column, descending] = sorted.get(nameOf(table)) ?? [-1, false];
    sorted.set(nameOf(table), [th.cellIndex, column === th.cellIndex ? !descending : th.classList.contains("n")]);
    arrange(document);
  });
  document.addEventListener("input", (e) => {
    if (!e.target.dataset?.filter) return;
    filters.set(e.target.dataset.filter, e.target.value);
    arrange(document);
  });

  // listen keeps the page up to date while it is looked at: browsers have few connections.
  function listen(live) {
    const status = document.getElementById("connection");
    let source = null;
    const stop = () => { source?.close(); source = null; };
    const start = () => {
      if (source || document.hidden) return;
      const newest = charts.map((c) => topics.get(c.topic)?.samples.at(-1)?.[0] ?? 0); // 0: the stream has all of it
      const since = newest.length ? Math.min(...newest) : 0;
      const path = live.dataset.live;
      source = new EventSource(path + (path.includes("?") ? "&" : "?") + "since=" + since);
      source.addEventListener("live", (e) => {
        status.textContent = "Live.";
        const next = new DOMParser().parseFromString(e.data, "text/html");
        for (const input of live.querySelectorAll("input[type=search]:not([data-filter])")) next.getElementById(input.id)?.setAttribute("value", input.value);
        for (const open of live.querySelectorAll("details[open][id]")) next.getElementById(open.id)?.setAttribute("open", "");
        arrange(next);
        // htmx changes only what differs, so that the focus stays where it is.
        htmx.swap({ text: next.body.innerHTML, target: live, sourceElement: live, swap: "innerMorph" });
      });
      source.addEventListener("samples", (e) => take(JSON.parse(e.data)));
      source.onerror = () => {
        stop();
        status.textContent = "Not connected: the page is as it was.";
        setTimeout(start, 3000 + 4000 * Math.random());
      };
    };
    document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
    addEventListener("pagehide", stop);
    addEventListener("pageshow", start);
    start();
  }

  // ask takes what there is of a topic. What is not answered the stream makes up for.
  async function ask(name) {
    try {
      const answer = await fetch(source + "?topic=" + encodeURIComponent(name), { signal: AbortSignal.timeout(5000) });
      if (answer.ok) take(await answer.json());
    } catch (err) {
      console.warn("no samples of " + name, err);
    }
  }

  // questions moves the focus to a question, and takes it away when the answer is no.
  function questions() {
    const answer = document.getElementById("answer");
    document.addEventListener("htmx:after:swap", () => document.getElementById("sure")?.focus());
    answer.addEventListener("click", (e) => { if (e.target.id === "cancel") answer.replaceChildren(); });
    addEventListener("keydown", (e) => { if (e.key === "Escape" && document.getElementById("sure")) answer.replaceChildren(); });
  }

  // choose makes a group of buttons set what charts show.
  function choose(attribute, set) {
    document.querySelectorAll(`[data-${attribute}]`).forEach((button) => button.addEventListener("click", () => {
      set(button.dataset[attribute]);
      document.querySelectorAll(`[data-${attribute}]`).forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      redraw();
    }));
  }

  // themes lets the reader choose between the system's theme, light and dark.
  function themes() {
    const button = document.getElementById("theme");
    const label = () => button.setAttribute("aria-label", "Theme: " + (document.documentElement.dataset.theme ?? "as the system"));
    label();
    button.addEventListener("click", () => {
      const next = { undefined: "light", light: "dark", dark: undefined }[document.documentElement.dataset.theme];
      if (next) document.documentElement.dataset.theme = next;
      else delete document.documentElement.dataset.theme;
      try { next ? localStorage.setItem("srtm-theme", next) : localStorage.removeItem("srtm-theme"); } catch { /* it holds for this page */ }
      label();
      redraw();
    });
  }

  async function begin() {
    themes();
    questions();
    document.querySelectorAll(".chart").forEach((box) => charts.push(new Chart(box)));
    addEventListener("resize", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    choose("quantile", (v) => { shown.quantile = Number(v); });
    choose("span", (v) => { shown.span = Number(v); shown.zoom = null; });
    choose("log", (v) => { shown.log = v === "on"; });
    document.querySelectorAll("[data-zoom]").forEach((b) => b.addEventListener("click", () => { shown.zoom = null; redraw(); }));
    await Promise.all([...new Set(charts.map((c) => c.topic))].map(ask));
    redraw();
    const live = document.getElementById("live");
    if (live) listen(live);
  }
  begin();
})();
