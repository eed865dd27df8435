package up

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/tools/iotpub/load"
	"github.com/srtm-io/srtm/tools/iotpub/report"
)

type job struct {
	name, topic string
	load        load.Options
	duration    time.Duration
}

// drain is iotpub's timeout for the answers, and then for the pause between two
// deliveries, before it counts messages as lost.
const drain = 8 * time.Second

// emulator is a running iotpub. iotpub is a separate process so that its garbage
// collector and threads do not disturb the view.
type emulator struct {
	process *local.Process

	mu struct {
		sync.Mutex
		partial  []byte // incomplete line
		progress *report.Progress
		report   *report.Report
		fault    error // an invalid line
	}
}

func startEmulator(c *local.Cluster, binDir, dataDir string, j job) (*emulator, error) {
	args := append([]string{
		"run", "--output=json", "--progress=1s", "--subscribe", "--channel=up",
		"--topic=" + j.topic, "--duration=" + j.duration.String(), "--drain-timeout=" + drain.String(),
		"--lookupd-http-address=" + c.Lookup,
	}, j.load.Args()...)
	if len(c.MQTT) > 0 { // the brokers know the placement, and devices need not know it
		args = append(args, "--protocol=mqtt", "--mqtt-address="+c.MQTT[0])
	} else {
		args = append(args, "--loaddistributor-address="+c.GRPC)
	}
	e := &emulator{}
	var err error
	e.process, err = local.Start(filepath.Join(binDir, "iotpub"), args, local.Options{Log: filepath.Join(dataDir, "iotpub-"+j.name+".log"), Stdout: e})
	return e, err
}

// Write parses the emulator's standard output: one JSON object per line.
func (e *emulator) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.partial = append(e.mu.partial, p...)
	for {
		i := bytes.IndexByte(e.mu.partial, '\n')
		if i < 0 {
			return len(p), nil
		}
		e.lineLocked(e.mu.partial[:i])
		e.mu.partial = e.mu.partial[i+1:]
	}
}

func (e *emulator) lineLocked(line []byte) {
	var kind struct {
		Type string `json:"type"`
	}
	err := json.Unmarshal(line, &kind)
	switch kind.Type {
	case report.TypeProgress:
		var p report.Progress
		if err = json.Unmarshal(line, &p); err == nil {
			e.mu.progress = &p
		}
	case report.TypeReport:
		var r report.Report
		if err = json.Unmarshal(line, &r); err == nil {
			e.mu.report = &r
		}
	default:
		err = errors.Join(fmt.Errorf("a line of type %q", kind.Type), err)
	}
	if err != nil && e.mu.fault == nil {
		e.mu.fault = fmt.Errorf("iotpub printed %.100q: %w", line, err)
	}
}

// progress returns the latest progress, nil before the first.
func (e *emulator) progress() *report.Progress {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mu.progress
}

// wait calls tick every second until the emulator has ended, and returns its report. When
// ctx ends, wait makes the emulator drain and report. wait calls failed at every tick and
// stops on its error.
func (e *emulator) wait(ctx context.Context, failed func() error, tick func()) (*report.Report, error) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	stop := ctx.Done()
	for {
		select {
		case <-ticker.C:
			if err := failed(); err != nil {
				return nil, errors.Join(err, e.process.Stop())
			}
			tick()
			continue
		case <-stop:
			stop = nil
			e.process.Terminate()
			continue
		case <-e.process.Done():
		}
		break
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.report != nil && e.mu.fault == nil {
		return e.mu.report, nil // the exit code adds nothing
	}
	failure := e.process.Failure()
	if failure == nil && ctx.Err() == nil {
		failure = errors.New("iotpub ended without a report")
	}
	return nil, errors.Join(e.mu.fault, failure)
}
