package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/srtm-io/srtm/internal/secure"
)

func gatewayCommand() *cobra.Command {
	return parent("gateway", "What gateways do", "", gatewayStatusCommand())
}

// gatewayStatus is what is shown of a gateway's /status.
type gatewayStatus struct {
	Classes []struct {
		Name           string
		Weight, Queued int
		InFlight       int `json:"in_flight"`
		Sent           uint64
		Full           uint64  `json:"refused_full"`
		Late           uint64  `json:"refused_late"`
		Denied         uint64  `json:"refused_admission"`
		WaitMsP99      float64 `json:"wait_ms_p99"`
		Used           map[string]float64
	}
	Servers []struct {
		URL             string
		InFlight        int `json:"in_flight"`
		Sent, Failed    uint64
		MeanDepartureMs float64 `json:"mean_departure_ms"`
		AnswerMs        float64 `json:"answer_ms"`
		Ejected         bool
		Free            map[string]float64
	}
}

func gatewayStatusCommand() *cobra.Command {
	c := &cli{}
	cmd := &cobra.Command{
		Use: "status", Short: "Show the classes and servers of a gateway",
		Long: `status shows what each class was sent and refused, and its part of what all
classes were charged of each resource (USED), since the gateway started or its
policy changed; and of each server what is free, the mean time between two of
its answers (T), and when one more request would be answered.`,
	}
	c.flagsTo(cmd, "gateway", "127.0.0.1:4196", "`host:port` of the gateway's --admin-address", 10*time.Second)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := c.check(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), c.timeout)
		defer cancel()
		text, err := askHTTP(ctx, c.address, "/status", c.trust)
		if err != nil {
			return err
		}
		var s gatewayStatus
		if err := json.Unmarshal(text, &s); err != nil {
			return fmt.Errorf("the gateway's status: %w", err)
		}
		out := cmd.OutOrStdout()
		return c.print(out, json.RawMessage(text), func() error { return s.print(out) })
	}
	return cmd
}

func (s *gatewayStatus) print(out io.Writer) error {
	all := map[string]float64{}
	for _, c := range s.Classes {
		for name, used := range c.Used {
			all[name] += used
		}
	}
	resources := slices.Sorted(maps.Keys(all))
	head := "CLASS\tWEIGHT\tQUEUED\tIN-FLIGHT\tSENT\tREFUSED\tP99-WAIT"
	for _, name := range resources {
		head += "\tUSED-" + strings.ToUpper(name)
	}
	rows := make([][]any, len(s.Classes))
	for i, c := range s.Classes {
		rows[i] = []any{c.Name, c.Weight, c.Queued, c.InFlight, c.Sent, c.Full + c.Late + c.Denied, fmt.Sprintf("%.1fms", c.WaitMsP99)}
		for _, name := range resources {
			rows[i] = append(rows[i], fmt.Sprintf("%.1f%%", 100*c.Used[name]/max(all[name], 1e-9)))
		}
	}
	self := func(row []any) []any { return row }
	if err := table(out, head, rows, self); err != nil {
		return err
	}
	head = "SERVER\tSTATE\tIN-FLIGHT\tSENT\tFAILED\tT\tANSWER"
	for _, name := range resources {
		head += "\tFREE-" + strings.ToUpper(name)
	}
	rows = make([][]any, len(s.Servers))
	for i, v := range s.Servers {
		state := "ok"
		if v.Ejected {
			state = "ejected"
		}
		rows[i] = []any{v.URL, state, v.InFlight, v.Sent, v.Failed, fmt.Sprintf("%.2fms", v.MeanDepartureMs), fmt.Sprintf("%.2fms", v.AnswerMs)}
		for _, name := range resources {
			rows[i] = append(rows[i], fmt.Sprintf("%.0f%%", v.Free[name]))
		}
	}
	if _, err := fmt.Fprintln(out); err != nil {
		return err
	}
	return table(out, head, rows, self)
}

// askHTTP gets a page of a daemon's HTTP address.
func askHTTP(ctx context.Context, address, path string, trust secure.ClientConfig) ([]byte, error) {
	tls, err := trust.TLS("")
	if err != nil {
		return nil, usagef("%w", err)
	}
	at := "http://" + address + path
	if tls != nil {
		at = "https://" + address + path
	}
	if _, err := url.Parse(at); err != nil {
		return nil, usagef("%w", err)
	}
	var token secure.Bearer
	if trust.TokenFile != "" {
		if token, err = secure.TokenFile(trust.TokenFile); err != nil {
			return nil, usagef("--token-file: %w", err)
		}
	}
	transport := &http.Transport{TLSClientConfig: tls, DisableKeepAlives: true}
	return fetch(ctx, transport.RoundTrip, token, http.MethodGet, at)
}
