package figures

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/srtm-io/srtm/tools/sim/web"
)

const (
	// mqosScale is the slowdown of the live resources, relative to the simulation. A timer
	// is late by a tenth of a millisecond.
	mqosScale = 3
	// Fraction of the paper's clients, warm-up time and measured time.
	mqosClients            = 0.2
	mqosWarmup, mqosLength = 8 * time.Second, 20 * time.Second
)

// website is a server with three resources. A resource is a timer for one request at a
// time.
type website struct {
	resources [3]chan struct{}
	busy      [3][3]atomic.Int64 // by class and resource, in ns
}

// ServeHTTP answers /CLASS/PAGE (both numbers), and reports the cost of the request.
func (s *website) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	var class, page int
	if _, err := fmt.Sscanf(r.URL.Path, "/%d/%d", &class, &page); err != nil || class >= 3 || page >= 3 {
		http.NotFound(rw, r)
		return
	}
	report := "TEXT "
	for k, name := range web.Resources() {
		work := time.Duration(web.Pages()[page].Work[k] * (.5 + rand.Float64()) * mqosScale * 1e9)
		s.resources[k] <- struct{}{}
		start := time.Now()
		time.Sleep(work)
		work = time.Since(start) // includes the timer's lateness
		<-s.resources[k]
		s.busy[class][k].Add(int64(work))
		report += fmt.Sprintf("request_cost.%s=%g,", name, work.Seconds())
	}
	rw.Header().Set("Endpoint-Load-Metrics", strings.TrimSuffix(report, ","))
}

// liveShares measures a live server in several runs. It returns each class's use of each resource
// in percent, by resource.
func (w *harness) liveShares(scheduler string) (shares [3]string, err error) {
	var runs [3][]string
	for range min(w.runs, liveRuns) {
		got, err := w.liveRun(scheduler)
		if err != nil {
			return shares, err
		}
		for k, s := range got {
			runs[k] = append(runs[k], fmt.Sprintf("%.1f / %.1f / %.1f", s[0], s[1], s[2]))
		}
	}
	for k := range shares {
		shares[k] = overRuns(runs[k])
	}
	return shares, nil
}

// liveRun measures a live server behind the gateway daemon. It returns each class's use of each
// resource in percent, by resource and class.
func (w *harness) liveRun(scheduler string) (shares [3][3]float64, err error) {
	ctx, end := context.WithCancel(w)
	var running sync.WaitGroup
	defer func() { end(); running.Wait() }()
	site := &website{}
	for k := range site.resources {
		site.resources[k] = make(chan struct{}, 1)
	}
	server, endSite, err := w.serve(site)
	if err != nil {
		return shares, err
	}
	defer endSite()
	policy := fmt.Sprintf("[[server]]\nurl = \"http://%s\"\ncpu = 1\ndisk = 1\nnetwork = 1\n", server)
	for class, weight := range []int{6, 3, 1} {
		policy += fmt.Sprintf("[[class]]\nname = \"c%d\"\nweight = %d\nwait = \"10m\"\nmatch = [{ path = \"/%d/\" }]\n", class+1, weight, class)
		for page, p := range web.Pages() {
			policy += fmt.Sprintf("[[cost]]\npath = \"/%d/%d\"\n", class, page)
			for k, name := range web.Resources() {
				policy += fmt.Sprintf("%s = %g\n", name, p.Work[k]*mqosScale)
			}
		}
	}
	at, stop, err := w.gateway(policy, "--scheduler", scheduler)
	if err != nil {
		return shares, err
	}
	defer func() { err = errors.Join(err, stop()) }()
	browser := &http.Client{Timeout: time.Minute, Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}
	defer browser.CloseIdleConnections()
	var failures atomic.Int64
	for class := range 3 {
		for page, p := range web.Pages() {
			for range int(mqosClients * float64(p.Clients)) {
				running.Go(func() {
					for ctx.Err() == nil {
						r, _ := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s/%d/%d", at, class, page), nil)
						resp, err := browser.Do(r)
						if err != nil {
							continue // the end of the run, or a failure that the server does not count
						}
						_, _ = io.Copy(io.Discard, resp.Body)
						resp.Body.Close()
						if resp.StatusCode != http.StatusOK {
							failures.Add(1)
						}
					}
				})
			}
		}
	}
	var before [3][3]int64
	for _, until := range []time.Duration{mqosWarmup, mqosLength} {
		start := time.Now()
		select {
		case <-time.After(until):
		case <-w.Done():
			return shares, w.Err()
		}
		for class := range 3 {
			for k := range 3 {
				now := site.busy[class][k].Load()
				shares[k][class] = 100 * float64(now-before[class][k]) / float64(time.Since(start))
				before[class][k] = now
			}
		}
	}
	if n := failures.Load(); n > 0 {
		return shares, fmt.Errorf("%d requests were refused", n)
	}
	return shares, nil
}
