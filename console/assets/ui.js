// Keeps a page up to date and draws its charts. The page works without it, as it was
// when it was loaded.
"use strict";
(() => {
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const PARTS = ["access", "broker", "consumer"]; // as in a row of samples, from its 8th column
  const HUES = [210, 30, 130, 280, 0, 180, 330, 60, 240, 90];
  const source = new URL("../data", document.currentScript.src).href; // also where a proxy serves the pages below a prefix
  const topics = new Map(); // name -> {brokers, samples}
  const charts = [];
  let quantile = 1;

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
          return PARTS.map((name, i) => [name, style("--" + name), at(7 + 3 * i + quantile)])
            .concat(slo ? [["SLO", style("--bad"), () => slo]] : []);
        case "delivery":
          return ["p50", "p99", "p99.9"].map((name, i) => [name, style("--" + PARTS[i]), at(16 + i)]);
        case "rates":
          return [["offered", style("--access"), at(1)], ["released", style("--broker"), at(2)], ["delivered", style("--consumer"), at(3)]];
        case "backlog":
          return [["backlog", style("--access"), at(5)]];
        default: {
          const light = matchMedia("(prefers-color-scheme: dark)").matches ? 65 : 38;
          return topics.get(this.topic).brokers.map((name, i) => [name, `hsl(${HUES[i % HUES.length]} 70% ${light}%)`, at(19 + i)]);
        }
      }
    }
    draw() {
      const known = topics.get(this.topic);
      if (!known || known.samples.length < 2) return;
      const lines = this.lines();
      const data = [known.samples.map((row) => row[0] / 1000), ...lines.map((l) => known.samples.map(l[2]))];
      const shape = lines.map((l) => l[0] + l[1]).join();
      const width = Math.max(200, this.box.clientWidth);
      if (this.plot && this.drawn === shape) {
        if (this.plot.width !== width) this.plot.setSize({ width, height: 200 });
        this.plot.setData(data);
        return;
      }
      if (this.plot) this.plot.destroy();
      this.drawn = shape;
      const axis = { stroke: style("--faint"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
      this.plot = new uPlot({
        width, height: 200, cursor: { drag: { x: true, y: false } },
        scales: { y: { range: (u, low, high) => [0, Math.max(high * 1.05, 1e-3)] } },
        axes: [axis, { ...axis, size: 60 }],
        series: [{}, ...lines.map(([label, stroke], i) => ({
          label, stroke, width: 1.5, dash: label === "SLO" ? [6, 4] : i % 3 === 1 ? [8, 2] : undefined,
          value: (u, v) => (v == null ? "–" : v.toPrecision(3)),
        }))],
      }, data, this.box);
      this.box.dataset.drawn = "true";
    }
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

  // listen keeps the page up to date while it is looked at: browsers have few connections.
  function listen(live) {
    const told = document.getElementById("connection");
    let source = null;
    const stop = () => { source?.close(); source = null; };
    const start = () => {
      if (source || document.hidden) return;
      const newest = charts.map((c) => topics.get(c.topic)?.samples.at(-1)?.[0] ?? 0); // 0: the stream has all of it
      const since = newest.length ? Math.min(...newest) : 0;
      const path = live.dataset.live;
      source = new EventSource(path + (path.includes("?") ? "&" : "?") + "since=" + since);
      source.addEventListener("live", (e) => {
        told.textContent = "Live.";
        // htmx changes only what differs, so that the focus stays where it is.
        htmx.swap({ text: e.data, target: live, sourceElement: live, swap: "innerMorph" });
      });
      source.addEventListener("samples", (e) => take(JSON.parse(e.data)));
      source.onerror = () => {
        stop();
        told.textContent = "Not connected: the page is as it was.";
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

  async function begin() {
    document.querySelectorAll(".chart").forEach((box) => charts.push(new Chart(box)));
    const redraw = () => charts.forEach((c) => c.draw());
    addEventListener("resize", redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    document.querySelectorAll("[data-quantile]").forEach((button) => button.addEventListener("click", () => {
      quantile = Number(button.dataset.quantile);
      document.querySelectorAll("[data-quantile]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      charts.forEach((c) => c.draw());
    }));
    await Promise.all([...new Set(charts.map((c) => c.topic))].map(ask));
    const live = document.getElementById("live");
    if (live) listen(live);
  }
  begin();
})();
