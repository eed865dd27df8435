package client

import (
	"bufio"
	"compress/flate"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/golang/snappy"
	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/nsq/frames"
	"github.com/srtm-io/srtm/nsq/origin"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/pacing/header"
)

// Maximum size of a broker's frame in bytes, for a publisher and for a subscriber.
const (
	maxFrame   = 16 << 10
	maxMessage = 64 << 20
)

// Conn is an identified connection to a broker, for uses beyond Publisher.
//
// go-nsq's Conn trusts the broker. It allocates up to 2 GB for a frame, panics on an empty
// answer to IDENTIFY, continues without encryption if the broker does not grant TLS, and
// never ends if the broker sends a message. It leaves its descriptor to the garbage
// collector, and no context bounds its handshake.
type Conn struct {
	// set once
	cfg      *nsq.Config
	nc       net.Conn // the socket
	r        io.Reader
	unbind   func() bool // detaches the connection from its context
	maxReady int         // maximum RDY of the broker; 0: unknown

	maxFrame int // maximum bytes of a frame; owned by the reader

	mu struct { // guards writes
		sync.Mutex
		w     *bufio.Writer
		flush func() error // flushes a compressor below w; may be nil
	}
}

// Dial connects, identifies, upgrades and authenticates, within DialTimeout plus
// ReadTimeout. The default port is 4150. The connection ends with ctx, even during a write.
func Dial(ctx context.Context, address string, cfg *nsq.Config) (*Conn, error) {
	address = service.WithPort(address, service.NSQPort)
	dialer := net.Dialer{LocalAddr: cfg.LocalAddr, Timeout: cfg.DialTimeout}
	nc, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	c := &Conn{cfg: cfg, nc: nc, maxFrame: maxFrame}
	c.layer(nc, nc, nil)
	c.unbind = context.AfterFunc(ctx, func() { _ = nc.Close() }) // like Close
	err = nc.SetDeadline(time.Now().Add(cfg.ReadTimeout))
	if err == nil {
		err = c.greet(ctx, address)
	}
	if err == nil {
		err = nc.SetDeadline(time.Time{})
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	c.r = bufio.NewReader(c.r)
	return c, nil
}

// Close closes the connection. Pending operations fail.
func (c *Conn) Close() {
	c.unbind()
	_ = c.nc.Close() // the only possible error is that it is closed
}

// layer makes further data pass through r and w.
func (c *Conn) layer(r io.Reader, w io.Writer, flush func() error) {
	c.r = r // not buffered: data after an answer may belong to the next layer
	c.mu.w, c.mu.flush = bufio.NewWriter(w), flush
}

// greet sends IDENTIFY, and applies the options that the broker grants.
func (c *Conn) greet(ctx context.Context, address string) error {
	if _, err := c.nc.Write(wire.AppendMagic(nil)); err != nil {
		return err
	}
	answer, err := c.ask(c.identify())
	if err != nil {
		return fmt.Errorf("identify: %w", err)
	}
	var granted struct {
		TLS          bool `json:"tls_v1"`
		Deflate      bool `json:"deflate"`
		Snappy       bool `json:"snappy"`
		AuthRequired bool `json:"auth_required"`
		MaxReady     int  `json:"max_rdy_count"`
	}
	if string(answer) != wire.OK { // a broker without feature negotiation answers OK
		if err := json.Unmarshal(answer, &granted); err != nil {
			return fmt.Errorf("identify: %w", err)
		}
	}
	c.maxReady = granted.MaxReady
	var lower net.Conn = c.nc
	switch {
	case c.cfg.TlsV1 && !granted.TLS:
		return errors.New("TLS is wanted, and the broker does not have it")
	case c.cfg.TlsV1:
		conf := &tls.Config{}
		if c.cfg.TlsConfig != nil {
			conf = c.cfg.TlsConfig.Clone()
		}
		if conf.ServerName, _, err = net.SplitHostPort(address); err != nil {
			return err
		}
		secured := tls.Client(c.nc, conf)
		if err := secured.HandshakeContext(ctx); err != nil {
			return err
		}
		lower = secured
		c.layer(lower, lower, nil)
		if err := c.upgraded("TLS"); err != nil {
			return err
		}
	}
	switch {
	case c.cfg.Deflate && granted.Deflate:
		w, err := flate.NewWriter(lower, c.cfg.DeflateLevel)
		if err != nil {
			return err
		}
		c.layer(flate.NewReader(lower), w, w.Flush)
		if err := c.upgraded("deflate"); err != nil {
			return err
		}
	case c.cfg.Snappy && granted.Snappy:
		w := snappy.NewBufferedWriter(lower)
		c.layer(snappy.NewReader(lower), w, w.Flush)
		if err := c.upgraded("snappy"); err != nil {
			return err
		}
	}
	if !granted.AuthRequired && !origin.Is([]byte(c.cfg.AuthSecret)) {
		return nil
	}
	if c.cfg.AuthSecret == "" {
		return errors.New("the broker wants AUTH, and there is no secret")
	}
	auth, err := nsq.Auth(c.cfg.AuthSecret)
	if err == nil {
		answer, err = c.ask(auth, nil)
	}
	if err == nil {
		err = origin.CheckAnswer(c.cfg.AuthSecret, answer)
	}
	if err != nil {
		return fmt.Errorf("authenticate: %w", err)
	}
	return nil
}

// identify returns the IDENTIFY command.
func (c *Conn) identify() (*nsq.Command, error) {
	cfg := c.cfg
	ms := func(d time.Duration) int64 {
		if d == -1 {
			return -1
		}
		return d.Milliseconds()
	}
	text, err := json.Marshal(wire.IdentifyRequest{
		ClientID: cfg.ClientID, ShortID: cfg.ClientID, Hostname: cfg.Hostname, LongID: cfg.Hostname, UserAgent: cfg.UserAgent,
		FeatureNegotiation: true, TLSv1: cfg.TlsV1, Snappy: cfg.Snappy, Deflate: cfg.Deflate, DeflateLevel: int64(cfg.DeflateLevel),
		HeartbeatInterval: ms(cfg.HeartbeatInterval), OutputBufferTimeout: ms(cfg.OutputBufferTimeout), OutputBufferSize: cfg.OutputBufferSize,
		SampleRate: int64(cfg.SampleRate), MsgTimeout: ms(cfg.MsgTimeout),
	})
	return &nsq.Command{Name: []byte("IDENTIFY"), Body: text}, err
}

// ask writes a command and returns the answer. Requires: no other goroutine reads.
func (c *Conn) ask(cmd *nsq.Command, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	if err := c.Send(cmd); err != nil {
		return nil, err
	}
	return c.answer()
}

func (c *Conn) answer() ([]byte, error) {
	for {
		kind, data, err := frames.Read(c.r, maxFrame)
		switch {
		case err != nil:
			return nil, err
		case kind == wire.FrameError:
			return nil, refused(data)
		case kind != wire.FrameResponse:
			return nil, errUnasked
		case string(data) != wire.Heartbeat: // heartbeats may arrive while the broker waits for an auth server
			return data, nil
		}
		if err := c.Send(nsq.Nop()); err != nil {
			return nil, err
		}
	}
}

// upgraded waits for the broker's confirmation of a layer.
func (c *Conn) upgraded(layer string) error {
	answer, err := c.answer()
	if err == nil && string(answer) != wire.OK {
		err = fmt.Errorf("the broker says %.40q", answer)
	}
	if err != nil {
		return fmt.Errorf("upgrade to %s: %w", layer, err)
	}
	return nil
}

// Send writes a command. Any goroutine may call Send. After an error, part of the command
// may have been sent. Without a compressor the end of the command was not sent.
func (c *Conn) Send(cmd io.WriterTo) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.nc.SetWriteDeadline(time.Now().Add(c.cfg.WriteTimeout))
	if err == nil {
		_, err = cmd.WriteTo(c.mu.w)
	}
	if err == nil {
		err = c.mu.w.Flush()
	}
	if err == nil && c.mu.flush != nil {
		err = c.mu.flush()
	}
	return err
}

// Next returns the next frame, and answers heartbeats. Only one goroutine may call Next at
// a time. After an error the connection is unusable.
func (c *Conn) Next() (kind wire.FrameType, data []byte, err error) {
	for {
		if err = c.nc.SetReadDeadline(time.Now().Add(c.cfg.ReadTimeout)); err == nil {
			kind, data, err = frames.Read(c.r, c.maxFrame)
		}
		if err != nil || kind != wire.FrameResponse || string(data) != wire.Heartbeat {
			return kind, data, err
		}
		if err := c.Send(nsq.Nop()); err != nil {
			return 0, nil, err
		}
	}
}

// Subscribe subscribes to a channel. At most ready messages, or fewer if the broker has a
// lower limit, are unfinished at a time.
func (c *Conn) Subscribe(topic, channel string, ready int) error {
	c.maxFrame = maxMessage
	if err := c.Send(nsq.Subscribe(topic, channel)); err != nil {
		return err
	}
	kind, data, err := c.Next()
	switch {
	case err != nil:
		return err
	case kind == wire.FrameError:
		return refused(data)
	case string(data) != wire.OK:
		return fmt.Errorf("broker answered %.40q", data)
	}
	return c.Send(nsq.Ready(c.Ready(ready)))
}

// Ready returns the RDY that the broker allows, at most wanted.
func (c *Conn) Ready(wanted int) int {
	if c.maxReady > 0 {
		return min(wanted, c.maxReady)
	}
	return wanted
}

// errUnasked: a broker sent a message to a publisher.
var errUnasked = errors.New("broker sent a message to a publisher")

// read passes the broker's frames to r until the connection ends, and then the reason.
func (c *Conn) read(r *route) {
	for {
		kind, data, err := c.Next()
		switch {
		case err != nil:
		case kind == wire.FrameMessage:
			err = errUnasked
		case kind == wire.FrameError:
			r.answered(answer{refused(data)})
		case !header.IsOK(data):
			err = fmt.Errorf("broker answered %.40q", data)
		default:
			r.handlePaceAdvice(data)
		}
		if err != nil {
			r.end(err)
			return
		}
	}
}
