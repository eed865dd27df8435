package up

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tools/iotpub/load"
)

type options struct {
	load     load.Options
	brokers  int
	mcap     int64
	duration time.Duration
	together bool
	quantile float64
	slo      time.Duration
	burst    int64

	calibration time.Duration
	maxLateness time.Duration

	admission       bool
	gateway         bool
	mqtt            bool
	replicated      bool
	natsServer      string
	binDir, dataDir string
	memQueue        int
	output          string
	logLevel        string
}

func defaults() options {
	o := options{
		load: load.Default(), brokers: 6, mcap: 20_000, duration: time.Minute,
		quantile:    0.99,
		calibration: 3 * time.Second, maxLateness: 5 * time.Millisecond,
		memQueue: 100_000, output: "table", logLevel: "warn",
	}
	// Few messages, so that a token takes milliseconds: a stall of the machine is then
	// short compared with the waits of a blind split.
	o.load.Spec.Publishers, o.load.Spec.Rate = 200, 2
	o.load.Spec.GroupSize = 25 // the paper's groups
	return o
}

func (o *options) flags(fs *pflag.FlagSet) {
	o.load.Flags(fs)
	fs.IntVar(&o.brokers, "brokers", o.brokers, "number of brokers")
	fs.Int64Var(&o.mcap, "mcap", o.mcap, "maximum rate of each broker within the SLO, in `msg/s`; the default load fits one")
	fs.DurationVar(&o.duration, "duration", o.duration, "how long to send, half with SRTM's placement and half split blindly")
	fs.BoolVar(&o.together, "together", false, "send to both placements at the same time, each for all of --duration, so that the console shows them side by side; the machine carries the load twice")
	fs.Float64Var(&o.quantile, "slo-quantile", o.quantile, "`fraction` of messages to be delivered within --slo")
	fs.DurationVar(&o.slo, "slo", 0, "delivery latency of the SLO; 0: between what this machine needs without waits for tokens and what a blind split waits for them")
	fs.Int64Var(&o.burst, "burst", 0, "contract burst b, in `messages`; 0: more than the load needs on one broker, less than it needs split")
	fs.DurationVar(&o.calibration, "calibration", o.calibration, "how long one calibration of the load takes; 0: none, trust the machine")
	fs.DurationVar(&o.maxLateness, "max-lateness", o.maxLateness, "p99 of sending later than intended from which on the report calls its results the machine's")
	fs.BoolVar(&o.admission, "admission", false, "start admission, too, which brokers ask about HTTP publishes")
	fs.BoolVar(&o.gateway, "gateway", false, "start a gateway, too, whose /pub and /mpub go to the brokers")
	fs.BoolVar(&o.mqtt, "mqtt", false, "let the sensors publish over MQTT, to one of the brokers, which forwards to the publisher's broker")
	fs.BoolVar(&o.replicated, "replicated", false, "keep what brokers store in NATS JetStream, three copies on three nats-servers that are started too; 3 brokers unless --brokers says otherwise")
	fs.StringVar(&o.natsServer, "nats-server", "", "`path` of nats-server for --replicated (default in --bin-dir, else on PATH)")
	fs.StringVar(&o.binDir, "bin-dir", "", "`folder` of nsqd, loaddistributor, tbadaptor, iotpub, admission and gateway (default that of srtm)")
	fs.StringVar(&o.dataDir, "data-dir", "", "`folder` for the processes' logs and data (default a new one, removed after success)")
	fs.IntVar(&o.memQueue, "mem-queue-size", o.memQueue, "`messages` a broker holds per topic and channel")
	fs.StringVar(&o.output, "output", o.output, "`form` of the report: table or json; with json the live view goes to standard error")
	fs.StringVar(&o.logLevel, "log-level", o.logLevel, "minimum `level` that the processes log: debug, info, warn or error")
}

// findNATS returns the path of nats-server; "" without --replicated.
func (o *options) findNATS() (string, error) {
	if !o.replicated {
		return "", nil
	}
	if o.natsServer != "" {
		path, err := exec.LookPath(o.natsServer)
		if err != nil {
			return "", program.UsageError{Err: fmt.Errorf("--nats-server: %w", err)}
		}
		return path, nil
	}
	path, err := exec.LookPath(filepath.Join(o.binDir, "nats-server"))
	if err != nil {
		path, err = exec.LookPath("nats-server")
	}
	if err != nil {
		return "", fmt.Errorf("--replicated needs nats-server, which is neither in %s nor on PATH: make build puts it into bin/, https://nats.io/download has it; or name it with --nats-server", o.binDir)
	}
	return path, nil
}

// validate returns all faults joined, except the faults of the load (see
// load.Options.Build).
func (o *options) validate() error {
	var f faults.List
	f.If(o.brokers < 1 || o.brokers > 100, "--brokers %d: want 1 to 100", o.brokers)
	f.If(o.mcap < 1, "--mcap %d msg/s: want at least 1", o.mcap)
	f.If(o.duration < 2*time.Second, "--duration %v: want at least 2s", o.duration)
	f.If(!(o.quantile > 0 && o.quantile < 1), "--slo-quantile %v: want more than 0 and less than 1", o.quantile)
	if err := topics.CheckLatency(o.slo); o.slo != 0 && err != nil {
		f.If(true, "--slo: %w", err)
	}
	f.If(o.burst < 0, "--burst %d messages: want 0 or more", o.burst)
	f.If(o.burst > 0 && o.burst < int64(o.brokers), "--burst %d: want at least one message for each of %s", o.burst, plural.Count(o.brokers, "broker"))
	f.If(o.calibration < 0 || o.calibration > 0 && o.calibration < time.Second, "--calibration %v: want 0, or at least 1s", o.calibration)
	f.If(o.maxLateness <= 0, "--max-lateness %v: want more than 0", o.maxLateness)
	f.If(o.memQueue < 1, "--mem-queue-size %d: want at least 1", o.memQueue)
	f.If(o.natsServer != "" && !o.replicated, "--nats-server: it is for --replicated")
	f.If(o.output != "table" && o.output != "json", "--output %q: want table or json", o.output)
	return f.Err()
}
