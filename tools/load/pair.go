//go:build linux

package load

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/local"
)

// asking is the client for requests to the loaddistributor.
var asking = http.Client{Timeout: 5 * time.Second}

// Pair is a cluster of two of SRTM's nsqd. One broker carries the topic; the other broker
// has no capacity for the topic. Subscribers connect to the broker with the topic.
// Publishers do the same, or, if forwarded, connect to the other broker, which forwards
// messages. The processor time of both brokers counts. The loaddistributor is idle and does
// not count.
func Pair(path, control string, forwarded bool) Broker {
	name := "srtm-direct"
	if forwarded {
		name = "srtm-forwarded"
	}
	b := NSQ(name, path, "", func(Scenario) []string { return nil })
	b.control, b.forwarded = control, forwarded
	return b
}

// startBeside starts the loaddistributor of a pair, and returns the flags with which a
// broker joins. join starts the other broker later.
func (r *running) startBeside(b Broker, s Scenario) (join []string, err error) {
	rate, burst := 2*s.Rate, max(1000, int(s.Rate)/5) // like Ours
	if rate == 0 {
		rate, burst = 100_000_000, 1_000_000
	}
	control, err := local.OnFreePorts(2, func(at []string) (*local.Process, error) {
		r.control = at[1]
		join = []string{"--loaddistributor-address=" + at[0]}
		return local.Run(b.control, r.at.Dir, []string{
			"--grpc-address=" + at[0], "--http-address=" + at[1], "--tcp-address=", "--store=memory", "--fitting=off", "--log-level=error",
			fmt.Sprintf(`--default-topic={"contract":{"rate_milli":%d,"burst":%d}}`, int64(1000*rate), burst),
		}, local.Answers("http://"+at[1]+"/ping"))
	})
	if err == nil {
		r.beside = append(r.beside, control)
	}
	return join, err
}

// join starts the broker without the topic, and waits until both brokers have joined.
func (r *running) join(b Broker, s Scenario, flags []string) error {
	other, err := local.OnFreePorts(2, func(at []string) (*local.Process, error) {
		args, err := b.Args(Place{Dir: r.other, TCP: at[0], Web: at[1]}, s)
		if err != nil {
			return nil, err
		}
		if b.forwarded {
			r.publish = at[0]
		}
		return local.Start(b.Path, append(append(args, flags...), "--broker-id=other", "--mcap=1"), local.Options{Dir: r.other, Ready: local.Accepts(at...), Within: 5 * time.Second})
	})
	if err != nil {
		return err
	}
	r.beside, r.counted = append(r.beside, other), append(r.counted, other)
	return until(context.Background(), clock.Mono().Add(patience), func() bool {
		response, err := asking.Get("http://" + r.control + "/nodes")
		if err != nil {
			return false
		}
		text, err := io.ReadAll(response.Body)
		return errors.Join(err, response.Body.Close()) == nil && strings.Count(string(text), `"tcp_port"`) == 2
	}, func() error { return nil })
}
