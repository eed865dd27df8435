package cost

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/gateway/schedule"
	"github.com/srtm-io/srtm/internal/mono"
)

// Header carries a server's report in an answer. The gateway removes it.
const Header = "Endpoint-Load-Metrics"

// maxReport is the maximum length of a report in bytes.
const maxReport = 8 << 10

// Report is a server's report about a request and itself, for the resources of a Table.
type Report struct {
	// InFlight is the number of requests at the server, from all gateways (the named metric inflight);
	// -1: not reported.
	InFlight float64

	cost, busy [schedule.MaxResources]float64
	// fields and reports have the bit of each resource present in cost and busy.
	fields, reports uint
}

// ParseReport reads a Header: an ORCA load report (xds.data.orca.v3.OrcaLoadReport) as
// Envoy, gRPC and vLLM write it,
//
//	TEXT cpu_utilization=0.3, request_cost.disk=12, utilization.disk=0.9, named_metrics.inflight=4
//	JSON {"cpu_utilization": 0.3, "request_cost": {"disk": 12}, ...}
//
// request_cost is in the policy's units; cpu_utilization and mem_utilization are the utilization of
// "cpu" and "mem". Entries without a resource are ignored. On an error no part of the report counts.
func (t *Table) ParseReport(header string) (r Report, err error) {
	r.InFlight = -1
	form, rest, _ := strings.Cut(strings.TrimSpace(header), " ")
	switch {
	case len(header) > maxReport:
		err = fmt.Errorf("load report is longer than %d bytes", maxReport)
	case strings.EqualFold(form, "TEXT"):
		err = t.parseText(&r, rest)
	case strings.EqualFold(form, "JSON"):
		err = t.parseJSON(&r, rest)
	default:
		err = errors.New(`load report begins with neither "TEXT " nor "JSON "`)
	}
	if err != nil {
		return Report{InFlight: -1}, err
	}
	return r, nil
}

func (t *Table) parseText(r *Report, text string) error {
	for entry := range strings.SplitSeq(text, ",") {
		name, number, ok := strings.Cut(entry, "=")
		value, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		if !ok || err != nil {
			return fmt.Errorf("load report: %.60q is not of the form name=number", entry)
		}
		group, name, _ := strings.Cut(strings.TrimSpace(name), ".")
		if err := t.enter(r, group, name, value); err != nil {
			return err
		}
	}
	return nil
}

func (t *Table) parseJSON(r *Report, text string) error {
	var fields map[string]any
	if err := json.Unmarshal([]byte(text), &fields); err != nil {
		return fmt.Errorf("load report: %w", err)
	}
	var faults []error
	for _, group := range slices.Sorted(maps.Keys(fields)) {
		entries, ok := fields[group].(map[string]any)
		if !ok {
			entries = map[string]any{"": fields[group]}
		}
		for _, name := range slices.Sorted(maps.Keys(entries)) {
			if number, ok := entries[name].(float64); ok {
				faults = append(faults, t.enter(r, group, name, number))
			}
		}
	}
	return errors.Join(faults...)
}

// enter stores one entry of a report. group is the name of the field, in protobuf's or JSON's form;
// name is the key in the field's map.
func (t *Table) enter(r *Report, group, name string, value float64) error {
	if !(value >= 0) || math.IsInf(value, 1) {
		return fmt.Errorf("load report: %.40q %.40q is %v", group, name, value)
	}
	switch group {
	case "cpu_utilization", "cpuUtilization":
		group, name = "utilization", "cpu"
	case "mem_utilization", "memUtilization":
		group, name = "utilization", "mem"
	}
	k := slices.Index(t.names, name)
	switch {
	case (group == "named_metrics" || group == "namedMetrics") && name == "inflight":
		r.InFlight = value
	case k < 0:
	case group == "request_cost" || group == "requestCost":
		r.cost[k], r.fields = value, r.fields|1<<k
	case group == "utilization":
		r.busy[k], r.reports = value, r.reports|1<<k
	}
	return nil
}

// Drift: a server reports a resource as busy while the scheduler counts it as free, or the reverse.
const (
	busyOver  = 0.95 // reported as busy, with more than freeOver free: costs are larger
	freeOver  = 0.20
	growth    = 1.1 // of costs, per second
	maxDrift  = 4.0 // of costs, in both directions
	silentFor = 10 * time.Second
)

// drift is the factor by which requests cost more at a server than estimated. Dividing the server's
// capacities by the factors has the effect of larger costs at this server alone.
type drift struct {
	factor []float64
	last   mono.Time // time of the last report; 0: none
}

// Observe applies a server's report at now. free is the free part of capacity; both come from the
// scheduler's Server, in percent. Observe reports whether the server's Capacity has changed. The first
// report after 10 seconds of silence changes nothing.
func (t *Table) Observe(server int, r *Report, free, capacity schedule.Vector, now mono.Time) (changed bool) {
	if r.reports == 0 {
		return false
	}
	d := &t.drift[server]
	since := now.Sub(d.last)
	silent := d.last == 0 || since > silentFor || since < 0
	if d.last = now; silent {
		return false
	}
	step := math.Pow(growth, since.Seconds())
	for k := range d.factor {
		if r.reports&(1<<k) == 0 || !(capacity[k] > 0) {
			continue
		}
		was, left := d.factor[k], free[k]/capacity[k]
		switch {
		case r.busy[k] > busyOver && left > freeOver:
			d.factor[k] = min(was*step, maxDrift)
		case r.busy[k] < 1-freeOver && left < 1-busyOver:
			d.factor[k] = max(was/step, 1/maxDrift)
		}
		changed = changed || d.factor[k] != was
	}
	return changed
}
