//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/srtm-io/srtm/tools/iotpub/report"
	"github.com/srtm-io/srtm/tools/sim/calibrate"
)

const (
	topic    = "calibrate"
	patience = 10 * time.Second
	// carried is the part of the offered rate that has to be accepted: behind an
	// open loop that is not carried there is no steady state to measure.
	carried = 0.99
)

// measured is a measurement, and how late the emulator was.
type measured struct {
	calibrate.Measurement
	sentLate int64 // us, p99
}

// measure starts a broker, sends the load, and asks the broker what became of it.
func (c config) measure(ctx context.Context, l calibrate.Load) (m measured, err error) {
	m.Load = l
	ctx, cancel := context.WithTimeout(ctx, l.Duration+6*patience)
	defer cancel()
	b, err := start(ctx, c.nsqd)
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, b.stop()) }()
	before, err := b.cpu(ctx)
	if err != nil {
		return m, err
	}
	spec := l.Spec()
	cmd := exec.CommandContext(ctx, c.iotpub, "run", "--nsqd-tcp-address="+b.tcp, "--topic="+topic, "--subscribe", "--progress=0", "--output=json",
		"--publishers="+strconv.Itoa(spec.Publishers), "--rate="+strconv.FormatFloat(spec.Rate, 'g', -1, 64), "--batch="+strconv.Itoa(spec.Batch),
		"--process="+string(spec.Process), "--size="+strconv.Itoa(spec.Size), "--seed="+strconv.FormatUint(spec.Seed, 10), "--duration="+l.Duration.String())
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		return m, fmt.Errorf("iotpub: %w: %s", err, strings.TrimSpace(complaints.String()))
	}
	var sent report.Report
	if err := json.Unmarshal(out.Bytes(), &sent); err != nil {
		return m, fmt.Errorf("iotpub: %w", err)
	}
	if sent.AchievedRate < carried*sent.OfferedRate {
		return m, fmt.Errorf("%.0f of %.0f msg/s were accepted: this machine does not carry that load", sent.AchievedRate, sent.OfferedRate)
	}
	after, err := b.cpu(ctx)
	if err != nil {
		return m, err
	}
	text, err := b.get(ctx, "/stats?format=json&include_clients=false&topic="+topic)
	if err != nil {
		return m, err
	}
	q, err := processing(text)
	if err != nil {
		return m, err
	}
	us := func(n int64) time.Duration { return time.Duration(n) * time.Microsecond }
	m.Figures = calibrate.Figures{P50: us(q.P50), P99: us(q.P99), P999: us(q.P999), CPU: (after - before) / time.Duration(q.Count)}
	m.sentLate = sent.Lateness.P99Us
	return m, nil
}

// quantiles are the broker's, in microseconds.
type quantiles struct {
	Count int64 `json:"count"`
	P50   int64 `json:"p50"`
	P99   int64 `json:"p99"`
	P999  int64 `json:"p999"`
}

// processing reads the processing delay of the only topic from /stats.
func processing(stats []byte) (quantiles, error) {
	var s struct {
		Topics []struct {
			SRTM struct {
				Latency struct {
					Processing quantiles `json:"processing_us"`
				} `json:"latency"`
			} `json:"srtm"`
		} `json:"topics"`
	}
	if err := json.Unmarshal(stats, &s); err != nil {
		return quantiles{}, fmt.Errorf("/stats: %w", err)
	}
	if len(s.Topics) != 1 || s.Topics[0].SRTM.Latency.Processing.Count < 1 {
		return quantiles{}, errors.New("/stats: no processing delay: is this our nsqd?")
	}
	return s.Topics[0].SRTM.Latency.Processing, nil
}

// processorTime reads it from /metrics.
func processorTime(metrics []byte) (time.Duration, error) {
	for line := range strings.Lines(string(metrics)) {
		if text, ok := strings.CutPrefix(line, "process_cpu_seconds_total "); ok {
			seconds, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
			if err != nil {
				return 0, fmt.Errorf("/metrics: %w", err)
			}
			return time.Duration(seconds * 1e9), nil
		}
	}
	return 0, errors.New("/metrics: no process_cpu_seconds_total")
}

// broker is an nsqd of our own.
type broker struct {
	cmd       *exec.Cmd
	data      string // its folder
	log       bytes.Buffer
	tcp, http string
}

// start returns a broker that answers.
func start(ctx context.Context, path string) (*broker, error) {
	b := &broker{}
	for _, to := range []*string{&b.tcp, &b.http} {
		ln, err := net.Listen("tcp", "127.0.0.1:0") // a port that is free, most likely still in a moment
		if err != nil {
			return nil, err
		}
		*to = ln.Addr().String()
		if err := ln.Close(); err != nil {
			return nil, err
		}
	}
	data, err := os.MkdirTemp("", "calibrate-")
	if err != nil {
		return nil, err
	}
	b.data = data
	b.cmd = exec.CommandContext(ctx, path, "--data-path="+data, "--tcp-address="+b.tcp, "--http-address="+b.http, "--https-address=",
		"--log-level=warn", "--mem-queue-size=1000000") // nothing goes to disk
	b.cmd.Stdout, b.cmd.Stderr = &b.log, &b.log
	if err := b.cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(b.data))
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := b.get(ctx, "/ping")
		if err == nil {
			return b, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, errors.Join(err, b.stop())
		}
	}
}

func (b *broker) stop() error {
	if err := b.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	err := b.cmd.Wait()
	if err != nil {
		err = fmt.Errorf("nsqd: %w: %s", err, strings.TrimSpace(b.log.String()))
	}
	return errors.Join(err, os.RemoveAll(b.data))
}

func (b *broker) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.http+path, nil)
	if err != nil {
		return nil, err
	}
	client := &http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", path, resp.Status)
	}
	return io.ReadAll(resp.Body)
}

// cpu is the processor time that the broker has used.
func (b *broker) cpu(ctx context.Context) (time.Duration, error) {
	text, err := b.get(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	return processorTime(text)
}
