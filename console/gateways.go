package console

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// gatewayStatus is the shown part of a gateway's /status.
type gatewayStatus struct {
	Balance   string          `json:"balance"`
	Scheduler string          `json:"scheduler"`
	Resources []string        `json:"resources"`
	Classes   []gatewayClass  `json:"classes"`
	Servers   []gatewayServer `json:"servers"`
}

// gatewayClass is a class of requests with its queue.
type gatewayClass struct {
	Gateway  string             `json:"-"`
	Parts    []resource         `json:"-"` // this class's part of each resource that all classes used
	Name     string             `json:"name"`
	Weight   int                `json:"weight"`
	Queued   int                `json:"queued"`
	InFlight int                `json:"in_flight"`
	Sent     uint64             `json:"sent"`
	Full     uint64             `json:"refused_full"`
	Late     uint64             `json:"refused_late"`
	Denied   uint64             `json:"refused_admission"`
	Left     uint64             `json:"left"`
	WaitP50  float32            `json:"wait_ms_p50"`
	WaitP99  float32            `json:"wait_ms_p99"`
	Used     map[string]float64 `json:"used"`
}

// Refused returns the number of refused requests.
func (c gatewayClass) Refused() uint64 { return c.Full + c.Late + c.Denied }

// gatewayServer is a server behind a gateway.
type gatewayServer struct {
	Gateway   string             `json:"-"`
	Parts     []resource         `json:"-"` // used part of each of the server's resources
	URL       string             `json:"url"`
	InFlight  int                `json:"in_flight"`
	Limit     int                `json:"limit"`
	Sent      uint64             `json:"sent"`
	Failed    uint64             `json:"failed"`
	Departure float32            `json:"mean_departure_ms"`
	Answer    float32            `json:"answer_ms"`
	Ejected   bool               `json:"ejected"`
	Free      map[string]float64 `json:"free"`
}

// resource is a part of a resource, in percent.
type resource struct {
	Name string
	Part float64
}

// proxyState is a gateway.
type proxyState struct {
	Address string
	gatewayStatus
	Trouble string // "": the gateway answered
}

type gatewaysData struct {
	Configured bool
	Cards      []card
	Gateways   []proxyState
	Classes    []gatewayClass  // at most maxShown
	Servers    []gatewayServer // at most maxShown
}

// gatewayPage shows the classes, queues and servers of all gateways.
func (c *Console) gatewayPage(ctx context.Context, _ url.Values, _ user) (view, error) {
	d := gatewaysData{Configured: len(c.cfg.Gateways) > 0}
	addresses := map[string]string{}
	for _, address := range c.cfg.Gateways {
		addresses[address] = address
	}
	d.Gateways = each(addresses, func(address, _ string) proxyState {
		state := proxyState{Address: address}
		body, err := c.requester.cachedGet(ctx, c.cfg.Gateway, address, "/status")
		if err == nil {
			err = decode(address, body, &state.gatewayStatus)
		}
		if err != nil {
			state.Trouble = problemOf(err).text
		}
		return state
	})
	d.add()
	return view{Template: "gateways", Title: "Gateways", Data: d}, nil
}

// add joins the classes and servers of all gateways and sums them up for the cards.
func (d *gatewaysData) add() {
	answered, queued, inFlight, ejected := 0, 0, 0, 0
	for _, g := range d.Gateways {
		if g.Trouble == "" {
			answered++
		}
		all := map[string]float64{}
		for _, class := range g.Classes {
			queued += class.Queued
			inFlight += class.InFlight
			for name, used := range class.Used {
				all[name] += used
			}
		}
		for _, class := range g.Classes {
			class.Gateway = g.Address
			for _, name := range g.Resources {
				class.Parts = append(class.Parts, resource{name, 100 * class.Used[name] / max(all[name], 1e-9)})
			}
			d.Classes = append(d.Classes, class)
		}
		for _, server := range g.Servers {
			server.Gateway = g.Address
			if server.Ejected {
				ejected++
			}
			for _, name := range g.Resources {
				if free, found := server.Free[name]; found {
					server.Parts = append(server.Parts, resource{name, min(100, max(0, 100-free))})
				}
			}
			d.Servers = append(d.Servers, server)
		}
	}
	slices.SortStableFunc(d.Classes, func(a, b gatewayClass) int { return b.Queued - a.Queued })
	slices.SortStableFunc(d.Servers, func(a, b gatewayServer) int { return strings.Compare(a.URL, b.URL) })
	class := func(fault bool) string {
		if fault {
			return "bad"
		}
		return "good"
	}
	d.Cards = []card{
		{Name: "Gateways", Value: fmt.Sprint(answered), Unit: fmt.Sprintf("of %d answer", len(d.Gateways)), Class: class(answered < len(d.Gateways))},
		{Name: "Requests in queues", Value: thousands(fmt.Sprint(queued)), Unit: "requests"},
		{Name: "Requests at servers", Value: thousands(fmt.Sprint(inFlight)), Unit: "requests"},
		{Name: "Ejected servers", Value: fmt.Sprint(ejected), Unit: fmt.Sprintf("of %d", len(d.Servers)), Class: class(ejected > 0)},
	}
	d.Classes = d.Classes[:min(len(d.Classes), maxShown)]
	d.Servers = d.Servers[:min(len(d.Servers), maxShown)]
}
