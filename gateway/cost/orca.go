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

	"github.com/srtm-io/srtm/gateway/schedule"
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
