package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/bounded"
	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/secure"
	"github.com/srtm-io/srtm/internal/service"
	"github.com/srtm-io/srtm/internal/topics"
	"github.com/srtm-io/srtm/tools/srtm/calibrate"
)

func channelCommand() *cobra.Command {
	cmd := parent("channel", "Channels of a topic, on all of its brokers", "", channelListCommand(), channelEmptyCommand(), channelSeekCommand(), channelPeekCommand())
	for _, change := range channelChanges {
		cmd.AddCommand(change.command())
	}
	return cmd
}

// brokers selects the brokers of a topic for HTTP requests.
type brokers struct {
	http  []string // addresses or URLs; empty: from the loaddistributor
	trust secure.ClientConfig
}

func (b *brokers) flags(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().Var(service.AddressesFlag(&b.http, service.NSQHTTPPort), "nsqd-http-address", "HTTP `host:port` or URL of a broker, in place of those that the loaddistributor names; may be repeated")
	b.trust.Flags(cmd.Flags(), "nsqd-", "the brokers' HTTP API")
	return cmd
}

var topicAndChannel = between(2, 2, "a topic and a channel")

// addresses returns the HTTP addresses of a topic's brokers, sorted by id.
func (b *brokers) addresses(x *call, topic string) (addresses []string, err error) {
	if len(b.http) > 0 {
		return b.http, nil
	}
	r, err := x.admin.ListBrokers(x.ctx, &srtmv1.ListBrokersRequest{})
	for _, broker := range r.GetBrokers() {
		if !slices.Contains(broker.GetTopics(), topic) {
			continue
		}
		if !broker.GetConnected() || broker.GetHttpAddress() == "" {
			return nil, fmt.Errorf("broker %s of topic %s is not connected or has no HTTP address: nothing was done", broker.GetId(), topic)
		}
		addresses = append(addresses, broker.GetHttpAddress())
	}
	if err == nil && len(addresses) == 0 {
		err = fmt.Errorf("no broker has topic %s", topic)
	}
	return addresses, err
}

// ask sends a request to each broker, each with the timeout, and passes each answer to the function
// answer. A broker without the channel is a failure only if no broker has the channel.
func (b *brokers) ask(x *call, method, path string, query url.Values, addresses []string, answer func(address string, body []byte) error) error {
	encrypted, err := b.trust.TLS("nsqd-")
	if err != nil {
		return program.UsageError{Err: err}
	}
	client := &http.Client{
		Timeout: x.cli.timeout, Transport: &http.Transport{TLSClientConfig: encrypted},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // send the token to no other server
	}
	defer client.CloseIdleConnections()
	token, err := b.trust.Token("nsqd-")
	if err != nil {
		return program.UsageError{Err: err}
	}
	query.Set("topic", x.args[0])
	query.Set("channel", x.args[1])
	var errs, lack []error
	for _, address := range addresses {
		base, err := at(x.cmd.Context(), client.Do, address, encrypted != nil)
		var body []byte
		if err == nil {
			body, err = fetch(x.cmd.Context(), client.Do, token, method, base+path+"?"+query.Encode())
		}
		if err == nil {
			err = answer(address, body)
		} else if calibrate.Secured(address, body) != "" {
			err = calibrate.ErrTLS
		}
		if err != nil {
			err = fmt.Errorf("broker %s: %w", address, err)
		}
		switch {
		case err != nil && bytes.Contains(body, []byte(`"CHANNEL_NOT_FOUND"`)):
			lack = append(lack, err)
		case err != nil:
			errs = append(errs, err)
		}
	}
	if len(lack) == len(addresses) { // otherwise the broker has no messages of the channel yet
		errs = append(errs, lack...)
	}
	return errors.Join(errs...)
}

// at returns the URL of a broker's HTTP API. With TLS it is the HTTPS URL; a broker that
// requires TLS reports the port on its plain HTTP port.
func at(ctx context.Context, do func(*http.Request) (*http.Response, error), address string, encrypted bool) (string, error) {
	if strings.Contains(address, "://") {
		return strings.TrimSuffix(address, "/"), nil
	}
	if !encrypted {
		return "http://" + address, nil
	}
	text, err := fetch(ctx, do, nil, http.MethodGet, "http://"+address+"/ping")
	if url := calibrate.Secured(address, text); url != "" {
		return url, nil
	}
	if err == nil {
		err = errors.New("it requires no TLS: name its HTTPS port, with --nsqd-http-address=https://HOST:PORT")
	}
	return "", err
}

// fetch makes a request and returns the body. A status other than 200 is an error.
func fetch(ctx context.Context, do func(*http.Request) (*http.Response, error), token secure.Bearer, method, at string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, at, nil)
	if err != nil {
		return nil, err
	}
	if token != nil {
		r.Header.Set("Authorization", "Bearer "+token())
	}
	res, err := do(r)
	if dial := (*net.OpError)(nil); errors.As(err, &dial) && dial.Op == "dial" {
		return nil, dial // without the URL
	}
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := bounded.Read(res.Body, 64<<20)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.300s", res.Status, strings.TrimSpace(string(body)))
	}
	return body, err
}

func channelSeekCommand() *cobra.Command {
	var b brokers
	var place *srtmv1.Place
	var to, only string
	cmd := leaf(&cobra.Command{
		Use:   "seek TOPIC CHANNEL --to PLACE",
		Short: "Move a channel to another place in its topic",
		Long: `seek moves a channel of all brokers of the topic to the begin or the end of what they
have, to a time of publication (2026-01-02T15:04:05Z), or, on a single broker, to an
offset, and prints the offset at which each resumes. The channel drops what it has in
flight or deferred. What all channels have finished is there as long as nsqd
--retain or POST /topic/retain says. The loaddistributor orders it; brokers of no cluster
get the request at --nsqd-http-address.`,
		Example: `  srtm channel seek orders billing --to 2026-01-02T15:04:05Z`,
		Args:    topicAndChannel,
		PreRunE: func(*cobra.Command, []string) error {
			var ok bool
			if place, ok = topics.ParsePlace(to); !ok {
				return usagef("--to %q: want begin, end, a time such as 2026-01-02T15:04:05Z, or an offset", to)
			}
			if _, offset := place.GetTo().(*srtmv1.Place_Offset); len(b.http) > 0 && only != "" || offset && len(b.http) > 1 {
				return usagef("--nsqd-http-address goes without --broker, and --to an offset with one broker: each counts its own")
			}
			return nil
		},
	}, func(x *call) (err error) {
		type outcome struct {
			Broker string `json:"broker"`
			Offset uint64 `json:"offset"`
		}
		var all []outcome
		if len(b.http) > 0 {
			err = b.ask(x, http.MethodPost, "/channel/seek", url.Values{"to": {to}}, b.http, func(address string, body []byte) error {
				o := outcome{Broker: address}
				defer func() { all = append(all, o) }()
				return bounded.Decode(body, bounded.MaxElements, &o)
			})
		} else {
			r, refused := x.admin.SeekChannel(x.ctx, &srtmv1.SeekChannelRequest{Topic: x.args[0], Channel: x.args[1], To: place, BrokerId: only})
			errs := []error{refused}
			for _, broker := range r.GetBrokers() {
				if broker.GetReason() == "" {
					all = append(all, outcome{broker.GetBrokerId(), broker.GetOffset()})
				} else {
					errs = append(errs, fmt.Errorf("broker %s: %s: %s", broker.GetBrokerId(), broker.GetReason(), broker.GetError()))
				}
			}
			err = errors.Join(errs...)
		}
		if err != nil && len(all) == 0 {
			return err
		}
		return errors.Join(err, list(x, all, nil, "BROKER\tOFFSET", func(o outcome) []any { return []any{o.Broker, o.Offset} }))
	})
	cmd.Flags().StringVar(&to, "to", "", "begin, end, a time as RFC 3339, or an offset: the `place`")
	cmd.Flags().StringVar(&only, "broker", "", "`id` of the one broker that is to do it; empty: all of the topic")
	return b.flags(cmd)
}

func channelPeekCommand() *cobra.Command {
	var b brokers
	var count int
	type message struct {
		ID        string `json:"id"`
		Offset    uint64 `json:"offset"`
		Timestamp int64  `json:"timestamp"` // Unix ns
		Attempts  uint16 `json:"attempts"`
		Body      []byte `json:"body"` // as stored by the broker, base64
	}
	type displayed struct {
		Broker    string `json:"broker"`
		ID        string `json:"id"`
		Offset    uint64 `json:"offset"`
		Timestamp int64  `json:"timestamp"` // Unix ns
		Attempts  uint16 `json:"attempts"`
		bodyJSON
		body []byte
	}
	cmd := leaf(&cobra.Command{
		Use:   "peek TOPIC CHANNEL",
		Short: "Show the messages that a channel would get next, and take none",
		Args:  topicAndChannel,
	}, func(x *call) error {
		addresses, err := b.addresses(x, x.args[0])
		if err != nil {
			return err
		}
		var all []displayed
		err = b.ask(x, http.MethodGet, "/channel/peek", url.Values{"count": {strconv.Itoa(count)}}, addresses, func(address string, body []byte) error {
			var r struct{ Messages []message }
			err := bounded.Decode(body, bounded.MaxElements, &r)
			for _, m := range r.Messages {
				all = append(all, displayed{address, m.ID, m.Offset, m.Timestamp, m.Attempts, bodyOf(m.Body), m.Body})
			}
			return err
		})
		return errors.Join(err, list(x, all, nil, "BROKER\tOFFSET\tPUBLISHED\tATTEMPTS\tID\tBODY", func(m displayed) []any {
			return []any{m.Broker, m.Offset, time.Unix(0, m.Timestamp).UTC().Format(time.RFC3339Nano), m.Attempts, m.ID, strconv.Quote(string(m.body))}
		}))
	})
	cmd.Flags().IntVar(&count, "count", 10, "`messages` of each broker, 1 to 1000; their bodies are at most 1 MiB in sum, beside the first")
	return b.flags(cmd)
}
