//go:build linux

package calibrate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/tools/sim/calibrate"
	broker "github.com/srtm-io/srtm/tools/srtm/calibrate"
)

const (
	settle = 500 * time.Millisecond
	// carried is the part of the offered rate that has to be accepted: behind an
	// open loop that is not carried there is no steady state to measure.
	carried = 0.99
)

// measured is a measurement, and how late the generator was.
type measured struct {
	calibrate.Measurement
	sentLate int64 // us, p99
}

// measure starts a broker, sends the load, and asks the broker what became of it.
// Nothing limits it, so that delivery latency is all processing.
func (c config) measure(ctx context.Context, l calibrate.Load) (m measured, err error) {
	data, err := os.MkdirTemp("", "calibrate-")
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(data)) }()
	nsqd, err := local.NSQD(c.nsqd, data, "--log-level=warn", "--mem-queue-size=1000000") // nothing goes to disk
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, nsqd.Stop()) }()
	got, err := broker.Measure(ctx, broker.Config{
		TCP: nsqd.TCP, HTTP: nsqd.HTTP, Settle: settle, Step: l.Duration, Workers: 1, CPU: true, Logger: slog.New(slog.DiscardHandler),
	}, l.Spec())
	if err != nil {
		return m, err
	}
	if got.AchievedRate < carried*got.OfferedRate {
		return m, fmt.Errorf("%.0f of %.0f msg/s were accepted: this machine does not carry that load", got.AchievedRate, got.OfferedRate)
	}
	q := got.Delivery.Quantile
	m.Load = l
	m.Figures = calibrate.Figures{P50: q(0.5), P99: q(0.99), P999: q(0.999), CPU: got.CPU}
	m.sentLate = got.Lateness.P99Us
	return m, nil
}
