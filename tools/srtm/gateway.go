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

	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/tools/srtm/screen"
)

func gatewayCommand() *cobra.Command {
	return parent("gateway", "What gateways do", "", gatewayStatusCommand())
}

// gatewayStatus is the displayed part of a gateway's /status.
type gatewayStatus struct {
	Classes []gatewayClass
	Servers []gatewayServer
}

type gatewayClass struct {
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

type gatewayServer struct {
	URL             string
	InFlight        int `json:"in_flight"`
	Sent, Failed    uint64
	MeanDepartureMs float64 `json:"mean_departure_ms"`
	AnswerMs        float64 `json:"answer_ms"`
	Ejected         bool
	Free            map[string]float64
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
	c.flagsTo(cmd, "gateway", "127.0.0.1", service.GatewayAdminPort, "`host:port` of the gateway's --admin-address", 10*time.Second)
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
		if err := bounded.Decode(text, bounded.MaxElements, &s); err != nil {
			return fmt.Errorf("the gateway's status: %w", err)
		}
		out := screen.Safe(cmd.OutOrStdout())
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
	head := func(columns, each string) string {
		for _, name := range resources {
			columns += "\t" + each + strings.ToUpper(name)
		}
		return columns
	}
	err := table(out, head("CLASS\tWEIGHT\tQUEUED\tIN-FLIGHT\tSENT\tREFUSED\tP99-WAIT", "USED-"), s.Classes, func(c gatewayClass) []any {
		row := []any{c.Name, c.Weight, c.Queued, c.InFlight, c.Sent, c.Full + c.Late + c.Denied, fmt.Sprintf("%.1fms", c.WaitMsP99)}
		for _, name := range resources {
			row = append(row, fmt.Sprintf("%.1f%%", 100*c.Used[name]/max(all[name], 1e-9)))
		}
		return row
	})
	if err != nil {
		return err
	}
	fmt.Fprintln(out)
	return table(out, head("SERVER\tSTATE\tIN-FLIGHT\tSENT\tFAILED\tT\tANSWER", "FREE-"), s.Servers, func(v gatewayServer) []any {
		state := "ok"
		if v.Ejected {
			state = "ejected"
		}
		row := []any{v.URL, state, v.InFlight, v.Sent, v.Failed, fmt.Sprintf("%.2fms", v.MeanDepartureMs), fmt.Sprintf("%.2fms", v.AnswerMs)}
		for _, name := range resources {
			row = append(row, fmt.Sprintf("%.0f%%", v.Free[name]))
		}
		return row
	})
}

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
	token, err := trust.Token("")
	if err != nil {
		return nil, usagef("%w", err)
	}
	transport := &http.Transport{TLSClientConfig: tls, DisableKeepAlives: true}
	return fetch(ctx, transport.RoundTrip, token, http.MethodGet, at)
}
