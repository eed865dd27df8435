package up

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
)

// Gateway is what --gateway showed: classes that all asked for more than there was.
type Gateway struct {
	Requests uint64         `json:"requests"`
	Classes  []GatewayClass `json:"classes"`
}

// GatewayClass is what one class got.
type GatewayClass struct {
	Name   string  `json:"name"`
	Weight int     `json:"weight"`
	Used   float64 `json:"used"` // fraction of what all were charged
}

var gatewayClasses = []GatewayClass{{"gold", 6, 0}, {"silver", 3, 0}, {"bronze", 1, 0}}

const (
	gatewayRequests = 600 // to judge shares by
	gatewayWithin   = 20 * time.Second
	gatewayClients  = 16                    // of each class
	gatewayService  = 20 * time.Millisecond // of a request
)

// tryGateway has a gateway in front of two web servers, of which one takes four requests
// at a time and the other two, and asks it as three classes.
func (r *run) tryGateway(ctx context.Context) (err error) {
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("gateway: %w", err)
	}
	served := make(chan error, 1)
	server := &http.Server{ReadHeaderTimeout: startTimeout, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		clock.Sleep(r.Context(), gatewayService)
	})}
	go func() { served <- server.Serve(web) }()
	defer func() {
		err = errors.Join(err, server.Close())
		<-served
	}()
	var policy strings.Builder
	policy.WriteString("trusted_headers = [\"X-Class\"]\n[[cost]]\npath = \"/\"\ncpu = 5\n")
	for _, c := range gatewayClasses {
		fmt.Fprintf(&policy, "[[class]]\nname = %q\nweight = %d\nwait = \"1m\"\nmatch = [{ header = \"X-Class: %s\" }]\n", c.Name, c.Weight, c.Name)
	}
	for i, cpu := range []int{100, 50} { // the same process under two names
		fmt.Fprintf(&policy, "[[server]]\nurl = \"http://%s/%d\"\ncpu = %d\n", web.Addr(), i, cpu)
	}
	file := filepath.Join(r.dataDir, "policy.toml")
	if err := os.WriteFile(file, []byte(policy.String()), 0o600); err != nil {
		return fmt.Errorf("gateway: %w", err)
	}
	at, err := local.Ports(2)
	if err != nil {
		return fmt.Errorf("gateway: %w", err)
	}
	p, err := local.Start(filepath.Join(r.binDir, "gateway"), []string{"--policy", file, "--http-address", at[0], "--admin-address", at[1]},
		local.Options{Log: filepath.Join(r.dataDir, "gateway.log"), Ready: local.Answers("http://" + at[1] + "/healthz")})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Stop()) }()
	ctx, cancel := context.WithTimeout(ctx, gatewayWithin)
	defer cancel()
	transport := &http.Transport{MaxIdleConnsPerHost: 1000}
	defer transport.CloseIdleConnections()
	asking, enough := context.WithCancel(ctx)
	var clients sync.WaitGroup
	defer clients.Wait()
	defer enough()
	for _, c := range gatewayClasses {
		for range gatewayClients {
			clients.Go(func() {
				for asking.Err() == nil {
					// What fails is not counted, and the report has how much there was.
					_, _ = fetch(asking, transport, "http://"+at[0]+"/", c.Name)
				}
			})
		}
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for r.report.Gateway == nil || r.report.Gateway.Requests < gatewayRequests {
		select {
		case <-tick.C:
		case <-ctx.Done():
			if r.report.Gateway == nil {
				return fmt.Errorf("gateway: %w", ctx.Err())
			}
			return nil // fewer than wanted
		}
		text, err := fetch(ctx, transport, "http://"+at[1]+"/status", "")
		if err == nil {
			r.report.Gateway, err = gatewayShares(text)
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("gateway: %w", err)
		}
	}
	return nil
}

// gatewayShares reads a gateway's status.
func gatewayShares(text []byte) (*Gateway, error) {
	var status struct {
		Classes []struct {
			Sent uint64
			Used map[string]float64
		}
	}
	if err := json.Unmarshal(text, &status); err != nil || len(status.Classes) < len(gatewayClasses) {
		return nil, fmt.Errorf("status of %d classes: %w", len(status.Classes), err)
	}
	g, all := &Gateway{}, 0.0
	for _, c := range status.Classes {
		all += c.Used["cpu"]
	}
	for i, c := range gatewayClasses {
		g.Requests += status.Classes[i].Sent
		c.Used = status.Classes[i].Used["cpu"] / max(all, 1e-9)
		g.Classes = append(g.Classes, c)
	}
	return g, nil
}

// fetch gets a page as one of a class.
func fetch(ctx context.Context, transport *http.Transport, url, class string) (_ []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-Class", class)
	res, err := transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, res.Body.Close()) }()
	return io.ReadAll(io.LimitReader(res.Body, 1<<20))
}

// text is a line of the report.
func (g *Gateway) text() string {
	var weights, used []string
	for _, c := range g.Classes {
		weights = append(weights, fmt.Sprintf("%s %d", c.Name, c.Weight))
		used = append(used, fmt.Sprintf("%.1f %%", 100*c.Used))
	}
	return fmt.Sprintf("classes %s, all asking for more than there was, got %s of %d requests", strings.Join(weights, ", "), strings.Join(used, ", "), g.Requests)
}
