package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/nsqio/go-nsq"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/client"
	"github.com/srtm-io/srtm/internal/clock"
	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/plural"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/nsq/wire"
)

// nsqClient holds the connection flags of pub and tail.
type nsqClient struct {
	addresses []string // empty: from the loaddistributor
	options   []string
	secret    string
}

func (n *nsqClient) flags(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().Var(service.AddressesFlag(&n.addresses, service.NSQPort), "nsqd-tcp-address", "TCP `host:port` of a broker, in place of those that the loaddistributor names; may be repeated by tail")
	cmd.Flags().StringArrayVar(&n.options, "nsq-opt", nil, "`option=value` of go-nsq for connections to brokers, such as tls_v1=true; may be repeated")
	cmd.Flags().StringVar(&n.secret, "auth-secret-file", "", "`file` with the secret for AUTH")
	return cmd
}

// authSecret reads a secret: the only word of a file, or the token of a line with a role,
// as in token files.
func authSecret(path string) (string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if words := strings.Fields(string(text)); len(words) == 1 {
		return words[0], nil
	}
	token, err := secure.TokenFile(path)
	if err != nil {
		return "", err
	}
	return token(), nil
}

func (n *nsqClient) config() (*nsq.Config, error) {
	cfg := client.DefaultNSQConfig()
	cfg.UserAgent = "srtm"
	for _, o := range n.options {
		name, value, _ := strings.Cut(o, "=")
		if err := cfg.Set(name, value); err != nil {
			return nil, usagef("--nsq-opt %q: %v", o, err)
		}
	}
	if n.secret != "" {
		var err error
		if cfg.AuthSecret, err = authSecret(n.secret); err != nil {
			return nil, usagef("--auth-secret-file: %v", err)
		}
	}
	if err := cfg.Validate(); err != nil {
		return nil, usagef("--nsq-opt: %v", err)
	}
	return cfg, nil
}

// publication holds the flags of `pub`.
type publication struct {
	nsqClient
	id, message string
	count       int64
	rate        float64 // msg/s; 0: unlimited
}

const (
	// maxLine limits an input line in bytes. nsqd's --max-msg-size is usually smaller.
	maxLine = 64 << 20
	// pubAhead limits the unanswered publishes.
	pubAhead = 256
	// pubGrace is the wait for answers after an interrupt.
	pubGrace = 5 * time.Second
)

func pubCommand() *cobra.Command {
	var p publication
	cmd := leaf(&cobra.Command{
		Use:   "pub TOPIC [FILE...]",
		Short: "Publish messages, one for each line of the files or of standard input",
		Long: `pub publishes each line of the files, one file after the other, or of standard input (also
as "-"), as a message. pub skips empty lines. The loaddistributor names the broker of the
publisher --id, and pub follows when the publisher moves. If the topic is paced, pub keeps
to the advised rate. With --nsqd-tcp-address pub publishes to the named broker, which need
not be in a cluster.

pub stops at the first refused message, with exit code 1. --output json says how many
messages were accepted. After an interrupt (Ctrl-C) pub reads no further, and waits at
most 5 s for the answers to the sent messages.`,
		Example: `  srtm pub sensors readings.txt --rate 100
  srtm pub sensors --message '{"t":21.5}' --count 10
  journalctl -f -o json | srtm pub logs --id host1`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usagef("srtm pub: want a topic")
			case p.message != "" && len(args) > 1:
				return usagef("--message and files exclude each other")
			case p.count < 0 || p.rate < 0:
				return usagef("--count %d and --rate %g must not be negative", p.count, p.rate)
			case len(p.addresses) > 1:
				return usagef("--nsqd-tcp-address: a message goes to one broker")
			}
			return nil
		},
	}, p.run)
	f := cmd.Flags()
	f.StringVar(&p.id, "id", "", "`publisher` to be: one that the topic was created with; empty: the first of them")
	f.StringVar(&p.message, "message", "", "`text` of the message to publish instead of lines, --count times")
	f.Int64Var(&p.count, "count", 0, "`messages` to publish at most; 0: every line, or --message once")
	f.Float64Var(&p.rate, "rate", 0, "at most so many `msg/s`; 0: as fast as they are accepted")
	return p.flags(cmd)
}

func (p *publication) open(x *call) (*client.Publisher, error) {
	cfg, err := p.config()
	if err != nil {
		return nil, err
	}
	config := client.Config{NSQ: cfg, MaxOutstanding: pubAhead}
	topic, id := x.args[0], p.id
	if len(p.addresses) > 0 {
		config.Broker, id = p.addresses[0], cmp.Or(id, cfg.ClientID)
	} else {
		config.Address, config.DialOptions = x.cli.address, x.cli.options
		if id == "" {
			if id, err = firstPublisher(x, topic); err != nil {
				return nil, err
			}
		}
	}
	return client.NewPublisher(x.ctx, config, topic, id)
}

// firstPublisher returns the id of the topic's first declared publisher.
func firstPublisher(x *call, topic string) (string, error) {
	r, err := x.admin.GetTopic(x.ctx, &srtmv1.GetTopicRequest{Name: topic, PageSize: 1})
	if err != nil {
		return "", err
	}
	spec := r.GetTopic().GetSpec()
	if len(spec.GetGroups()) > 0 {
		return cmp.Or(spec.GetGroups()[0].GetKey(), "pool") + ".0", nil
	}
	if len(spec.GetPublishers()) > 0 {
		return spec.GetPublishers()[0].GetId(), nil
	}
	return "srtm-pub", nil // an open topic accepts any publisher
}

// run publishes until the input, --count or the context ends, or a message is refused.
func (p *publication) run(x *call) error {
	to, err := p.open(x)
	if err != nil {
		return err
	}
	if in, ok := x.cmd.InOrStdin().(*os.File); ok && term.IsTerminal(int(in.Fd())) {
		x.progress.stop() // the progress line would disturb typing
	}
	reading, stop := context.WithCancelCause(x.cmd.Context())
	defer stop(nil)
	// After an interrupt, wait for the answers to sent messages.
	patient, cancel := context.WithCancel(context.WithoutCancel(reading))
	defer cancel()
	defer context.AfterFunc(x.cmd.Context(), func() { time.AfterFunc(pubGrace, cancel) })()

	pending := make(chan func() error, pubAhead) // bounded: when it is full, publishing waits
	answered := make(chan int64)
	// While a publish is unanswered, the broker has --timeout for the next answer.
	silent := errors.New("")
	watch := time.AfterFunc(math.MaxInt64, func() {
		stop(silent)
		cancel()
	})
	defer watch.Stop()
	go func() {
		accepted := int64(0)
		failed := false
		for wait := range pending {
			watch.Reset(x.cli.timeout)
			err := wait()
			watch.Stop()
			if err == nil {
				accepted++
				x.progress.printf("%s published", plural.Count(accepted, "message"))
			} else if !failed {
				failed = true
				stop(err)
			}
		}
		answered <- accepted
	}()
	lines, ended := make(chan []byte), make(chan error, 1)
	// A read from a terminal or a pipe cannot be interrupted: this goroutine may live
	// until the process ends.
	go func() {
		ended <- p.read(reading, x.cmd, x.args[1:], lines)
		close(lines)
	}()
	pace := pace{every: every(p.rate)}
	var fault error
sending:
	for {
		select {
		case body, more := <-lines:
			if !more {
				fault = <-ended
				break sending
			}
			if !pace.wait(reading) {
				break sending
			}
			pending <- to.BeginPublish(patient, body).Wait
		case <-reading.Done():
			break sending
		}
	}
	close(pending)
	accepted := <-answered
	if x.cmd.Context().Err() == nil && reading.Err() != nil {
		if fault = context.Cause(reading); errors.Is(fault, silent) {
			fault = fmt.Errorf("no answer from broker %s for %v (see --timeout): it may have stopped, or its disk may be stuck", to.Broker(), x.cli.timeout)
		}
	}
	stop(nil) // the reader
	err = to.Close(patient)
	if fault != nil && patient.Err() != nil {
		err = nil // fault is the reason for the failed Close
	}
	return errors.Join(fault, err, x.print(map[string]int64{"published": accepted}, nil, "published %s to %s\n", plural.Count(accepted, "message"), x.args[0]))
}

// read sends the messages of the files, or of standard input, to the channel until ctx
// ends.
func (p *publication) read(ctx context.Context, cmd *cobra.Command, files []string, to chan<- []byte) error {
	left := p.count
	put := func(body []byte) (more bool) {
		select {
		case to <- body:
			left--
			return left != 0
		case <-ctx.Done():
			return false
		}
	}
	if p.message != "" {
		left = max(left, 1)
		for put([]byte(p.message)) {
		}
		return nil
	}
	if len(files) == 0 {
		files = []string{"-"}
	}
	for _, name := range files {
		in := io.NopCloser(cmd.InOrStdin())
		if name != "-" {
			f, err := os.Open(name)
			if err != nil {
				return err
			}
			in = f
		}
		scanner := bufio.NewScanner(in)
		scanner.Buffer(nil, maxLine)
		more, n := true, 1
		for ; more && scanner.Scan(); n++ {
			if len(scanner.Bytes()) > 0 {
				more = put(slices.Clone(scanner.Bytes()))
			}
		}
		in.Close()
		if err := scanner.Err(); err != nil {
			return fmt.Errorf("%s, line %d: %w", name, n, err)
		}
		if !more {
			return nil
		}
	}
	return nil
}

// pace keeps a rate, without catching up on lost time.
type pace struct {
	every time.Duration // 0: no limit
	next  time.Time
}

func every(rate float64) time.Duration {
	if rate <= 0 {
		return 0
	}
	return time.Duration(float64(time.Second) / rate)
}

// wait waits for the next send time, or returns false when ctx ends.
func (p *pace) wait(ctx context.Context) bool {
	if p.every == 0 {
		return ctx.Err() == nil
	}
	now := time.Now()
	if p.next.Before(now.Add(-time.Second)) {
		p.next = now
	}
	wait := p.next.Sub(now)
	p.next = p.next.Add(p.every)
	return clock.Sleep(ctx, wait)
}

// brokersPause is the pause between two lookups of the topic's brokers.
const brokersPause = time.Second

// tailAhead limits the delivered but unprinted messages of a broker.
const tailAhead = 200

// tail holds the flags and the state of `tail`.
type tail struct {
	nsqClient
	channel string
	count   int64

	x   *call
	cfg *nsq.Config
	end context.CancelFunc // stops the printing

	out struct { // state of the output
		sync.Mutex
		printed int64
		ended   bool
		fault   error // print error
	}
}

func tailCommand() *cobra.Command {
	var t tail
	cmd := leaf(&cobra.Command{
		Use:   "tail TOPIC",
		Short: "Print the messages of a topic as they come, a line each",
		Long: `tail prints each message of the topic, and a line feed, when a broker delivers the
message. --output json prints a line of JSON with the body as text, or as body_base64 if
the body is not UTF-8. Without --channel, tail reads from an ephemeral channel of its own,
which ends with tail, and takes nothing from other consumers. With --channel, tail is one
of the channel's consumers.

tail finishes the messages that it prints. Other delivered messages go back to the
channel. tail ends at --count, at an interrupt, and when the reader of its output is gone.`,
		Example: `  srtm tail sensors
  srtm tail sensors --count 10 --output json | jq -r .body`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) != 1:
				return usagef("srtm tail: want one topic")
			case t.count < 0:
				return usagef("--count %d must not be negative", t.count)
			case t.channel != "" && !nsq.IsValidChannelName(t.channel):
				return usagef("--channel %q is no valid name", t.channel)
			}
			return nil
		},
	}, t.run)
	cmd.Flags().StringVar(&t.channel, "channel", "", "`name` of the channel to consume; empty: an ephemeral one of its own")
	cmd.Flags().Int64Var(&t.count, "count", 0, "`messages` to print; 0: no end")
	return t.flags(cmd)
}

func (t *tail) run(x *call) error {
	x.progress.stop()
	// A closed output pipe is a print error and does not end the process, so unprinted
	// messages are requeued.
	defer lifecycle.KeepPipes()()
	var err error
	if t.cfg, err = t.config(); err != nil {
		return err
	}
	if !nsq.IsValidTopicName(x.args[0]) {
		return usagef("topic %q is no valid name", x.args[0])
	}
	t.x, t.channel = x, cmp.Or(t.channel, "tail."+rand.Text()[:10]+"#ephemeral")
	ctx, end := context.WithCancel(x.cmd.Context())
	defer end()
	t.end = end
	// After an interrupt, finish the printed messages.
	patient, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(pubGrace, cancel) })()
	ended := make(chan error, 1)
	go func() { ended <- t.follow(ctx, patient) }()
	select {
	case err = <-ended:
	case <-patient.Done(): // a blocked write to a pipe cannot be interrupted
		return nil
	}
	t.out.Lock()
	defer t.out.Unlock()
	if t.out.ended {
		err = t.out.fault
	}
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, io.ErrClosedPipe) {
		return nil
	}
	return err
}

type consumer struct {
	leave      context.CancelFunc
	subscribed chan error // receives nil or the error of subscribing, and after nil the reason for the end
}

// follow consumes from the brokers with the topic until ctx ends. follow fails if it
// cannot consume from any of the first brokers.
func (t *tail) follow(ctx, patient context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	connected := map[string]consumer{}
	lastReport := ""
	for first := true; ; first = false {
		addresses, err := t.brokers(ctx)
		for _, a := range slices.Sorted(maps.Keys(connected)) {
			select {
			case fault := <-connected[a].subscribed:
				connected[a].leave()
				delete(connected, a)
				err = errors.Join(err, fault)
			default:
				if len(addresses) > 0 && !slices.Contains(addresses, a) {
					connected[a].leave()
				}
			}
		}
		for _, a := range addresses {
			if _, is := connected[a]; is {
				continue
			}
			consuming, leave := context.WithCancel(ctx)
			c := consumer{leave, make(chan error, 2)}
			all.Go(func() { t.consume(consuming, patient, a, c.subscribed) })
			if fault := <-c.subscribed; fault != nil {
				leave()
				err = errors.Join(err, fault)
				continue
			}
			connected[a] = c
		}
		switch {
		case err == nil:
			lastReport = ""
		case ctx.Err() != nil:
		case first && len(connected) == 0:
			return err
		case err.Error() != lastReport:
			lastReport = err.Error()
			fmt.Fprintf(t.x.cmd.ErrOrStderr(), "srtm tail: %v; reading from %s and retrying\n", explain(err), plural.Count(len(connected), "broker"))
		}
		if !clock.Sleep(ctx, brokersPause) {
			return nil
		}
	}
}

// consume prints a broker's messages until ctx ends. Then it finishes the printed
// messages, at most until patient ends, and the broker requeues the others.
func (t *tail) consume(ctx, patient context.Context, address string, told chan<- error) {
	fail := func(err error) { told <- fmt.Errorf("broker %s: %w", address, err) }
	life, hangUp := context.WithCancel(patient)
	defer hangUp()
	subscribed := context.AfterFunc(ctx, hangUp)
	conn, err := client.Dial(life, address, t.cfg)
	if err != nil {
		fail(err)
		return
	}
	defer conn.Close()
	if err := conn.Subscribe(t.x.args[0], t.channel, int(min(cmp.Or(t.count, tailAhead), tailAhead))); err != nil {
		fail(err)
		return
	}
	told <- nil
	if subscribed() {
		defer context.AfterFunc(ctx, func() { _ = conn.Send(nsq.StartClose()) })() // if Send fails, Next fails
	}
	for {
		kind, data, err := conn.Next()
		switch {
		case err != nil:
		case kind == wire.FrameMessage:
			var m *nsq.Message
			if m, err = nsq.DecodeMessage(data); err == nil {
				err = t.take(conn, address, m)
			}
		case kind == wire.FrameError:
			if fault := wire.ParseError(data); fault.Fatal {
				err = fault
			}
		case string(data) == wire.CloseWait:
			told <- nil
			return
		}
		if err != nil {
			fail(err)
			return
		}
	}
}

// take prints and finishes a message, unless the output has ended.
func (t *tail) take(from *client.Conn, address string, m *nsq.Message) error {
	t.out.Lock()
	defer t.out.Unlock()
	if t.out.ended || t.x.cmd.Context().Err() != nil {
		return nil
	}
	t.out.fault = t.print(address, m)
	var err error
	if t.out.fault == nil {
		t.out.printed++
		err = from.Send(nsq.Finish(m.ID))
	}
	if t.out.ended = t.out.fault != nil || t.out.printed == t.count; t.out.ended {
		t.end()
	}
	return err
}

// brokers returns the addresses of the brokers that have the topic now.
func (t *tail) brokers(ctx context.Context) (addresses []string, err error) {
	if len(t.addresses) > 0 {
		return t.addresses, nil
	}
	ctx, cancel := context.WithTimeout(ctx, t.x.cli.timeout)
	defer cancel()
	r, err := t.x.admin.ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
	for _, b := range r.GetBrokers() {
		if b.GetConnected() && slices.Contains(b.GetTopics(), t.x.args[0]) {
			addresses = append(addresses, b.GetTcpAddress())
		}
	}
	if err == nil && len(addresses) == 0 {
		err = fmt.Errorf("no connected broker has topic %s", t.x.args[0])
	}
	return addresses, err
}

// bodyJSON is a message body in JSON: text for UTF-8, else base64.
type bodyJSON struct {
	Text   *string `json:"body,omitempty"`
	Base64 []byte  `json:"body_base64,omitempty"`
}

func bodyOf(body []byte) bodyJSON {
	if !utf8.Valid(body) {
		return bodyJSON{Base64: body}
	}
	text := string(body)
	return bodyJSON{Text: &text}
}

func (t *tail) print(address string, m *nsq.Message) error {
	text := append(m.Body, '\n')
	if t.x.cli.output == formJSON {
		var err error
		text, err = json.Marshal(struct {
			Broker    string `json:"broker"`
			ID        string `json:"id"`
			Timestamp int64  `json:"timestamp"` // Unix ns
			Attempts  uint16 `json:"attempts"`
			bodyJSON
		}{address, string(m.ID[:]), m.Timestamp, m.Attempts, bodyOf(m.Body)})
		if err != nil {
			return err
		}
		text = append(text, '\n')
	}
	_, err := t.x.cmd.OutOrStdout().Write(text) // unchanged, without screen.Safe
	return err
}
