package figures

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/srtm-io/srtm/bench/decide"
	"github.com/srtm-io/srtm/tools/sim/web"
)

// jbqScale is the speed of the live machines and their load, relative to the paper.
const jbqScale = 8

// daemon starts one of our daemons in a temporary folder. stop ends the daemon.
func (w *harness) daemon(name string, start func(bin, dir string) (*decide.Server, error)) (dir string, stop func() error, err error) {
	path, err := w.binary(name)
	if err != nil {
		return "", nil, err
	}
	if dir, err = os.MkdirTemp("", "figures-"+name+"-"); err != nil {
		return "", nil, err
	}
	s, err := start(filepath.Dir(path), dir)
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return dir, func() error { return errors.Join(s.Stop(), os.RemoveAll(dir)) }, nil
}

// gateway starts the gateway daemon with a policy. stop ends the daemon.
func (w *harness) gateway(policy string, flags ...string) (at string, stop func() error, err error) {
	_, stop, err = w.daemon("gateway", func(bin, dir string) (*decide.Server, error) {
		s, _, err := decide.Gateway(bin, dir, policy, flags...)
		if err == nil {
			at = s.At
		}
		return s, err
	})
	return at, stop, err
}

// behindGateway sends a minute of a cluster's load through the gateway daemon to live
// servers with timers as processors. It returns the response times by server, in ms at the
// paper's speed.
func (w *harness) behindGateway(c web.Cluster, balance string, seed uint64) (byServer []web.Summary, err error) {
	var policy strings.Builder
	for i, s := range c.Servers {
		free := make(chan struct{}, s.Processors)
		at, end, err := w.serve(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			demand, _ := strconv.ParseFloat(r.URL.Query().Get("ns"), 64)
			free <- struct{}{}
			time.Sleep(time.Duration(demand / s.Speed / jbqScale))
			<-free
			rw.Header().Set("X-Server", strconv.Itoa(i))
		}))
		if err != nil {
			return nil, err
		}
		defer end()
		fmt.Fprintf(&policy, "[[server]]\nurl = \"http://%s\"\n", at)
	}
	gateway, stop, err := w.gateway(policy.String(), "--balance", balance, "--scheduler=none")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stop()) }()

	browser := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 500}}
	defer browser.CloseIdleConnections()
	responses := make([][]float64, len(c.Servers))
	var mu sync.Mutex // guards responses and err
	var asking sync.WaitGroup
	start, load := time.Now(), c.NewLoad(seed)
	for {
		at, demand := load.Next()
		due := start.Add(time.Duration(at) / jbqScale)
		if due.Sub(start) > time.Minute {
			break
		}
		select {
		case <-time.After(time.Until(due)):
		case <-w.Done():
			asking.Wait()
			return nil, w.Err()
		}
		asking.Go(func() {
			resp, bad := browser.Get(fmt.Sprintf("http://%s/?ns=%d", gateway, int64(demand)))
			ms := time.Since(due).Seconds() * 1e3 * jbqScale
			if bad == nil {
				_, bad = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			mu.Lock()
			defer mu.Unlock()
			if bad != nil {
				err = bad
				return
			}
			if i, bad := strconv.Atoi(resp.Header.Get("X-Server")); bad == nil && i < len(responses) {
				responses[i] = append(responses[i], ms)
			} else {
				err = fmt.Errorf("the gateway answered %s", resp.Status)
			}
		})
	}
	asking.Wait()
	for _, v := range responses {
		byServer = append(byServer, web.Summarize(v))
	}
	return byServer, err
}
