package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/secure"
)

func channelCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "channel",
		Short: "Channels of a topic, on all of its brokers",
		Args:  noArguments,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(channelSeekCommand(), channelPeekCommand())
	return cmd
}

// brokers are those of a topic, asked over HTTP.
type brokers struct {
	cli
	http      []string // addresses or URLs; empty: what the loaddistributor says
	tokenFile string
}

func (b *brokers) flags(cmd *cobra.Command) {
	b.cli.flags(cmd)
	cmd.Flags().StringArrayVar(&b.http, "nsqd-http-address", nil, "HTTP `host:port` or URL of a broker, in place of those that the loaddistributor names; may be repeated")
	cmd.Flags().StringVar(&b.tokenFile, "nsqd-token-file", "", "`file` with the token for the brokers' HTTP API")
}

func topicAndChannel(cmd *cobra.Command, args []string) error {
	if len(args) != 2 {
		return usagef("%s: want a topic and a channel, got %d arguments", cmd.CommandPath(), len(args))
	}
	return nil
}

// of returns the HTTP addresses of a topic's brokers, in the order of their ids.
func (b *brokers) of(cmd *cobra.Command, topic string) (addresses []string, err error) {
	if len(b.http) > 0 {
		return b.http, nil
	}
	err = b.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
		r, err := srtmv1.NewAdminServiceClient(conn).ListBrokers(ctx, &srtmv1.ListBrokersRequest{})
		for _, one := range r.GetBrokers() {
			if !slices.Contains(one.GetTopics(), topic) {
				continue
			}
			if !one.GetConnected() || one.GetHttpAddress() == "" {
				return fmt.Errorf("broker %s of topic %s is not connected or has no HTTP address: nothing was done", one.GetId(), topic)
			}
			addresses = append(addresses, one.GetHttpAddress())
		}
		if err == nil && len(addresses) == 0 {
			err = fmt.Errorf("no broker has topic %s", topic)
		}
		return err
	})
	return addresses, err
}

// ask sends a request to each broker, and hands on the answers.
func (b *brokers) ask(cmd *cobra.Command, method, path string, query url.Values, addresses []string, answer func(address string, body []byte) error) error {
	client := &http.Client{Timeout: b.timeout}
	defer client.CloseIdleConnections()
	token := secure.Bearer(nil)
	if b.tokenFile != "" {
		var err error
		if token, err = secure.TokenFile(b.tokenFile); err != nil {
			return usagef("--nsqd-token-file: %v", err)
		}
	}
	var errs []error
	for _, address := range addresses {
		base := address
		if !strings.Contains(base, "://") {
			base = "http://" + base
		}
		body, err := b.fetch(cmd.Context(), client, token, method, strings.TrimSuffix(base, "/")+path+"?"+query.Encode())
		if err == nil {
			err = answer(address, body)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("broker %s: %w", address, err))
		}
	}
	return errors.Join(errs...)
}

func (*brokers) fetch(ctx context.Context, client *http.Client, token secure.Bearer, method, at string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, at, nil)
	if err != nil {
		return nil, err
	}
	if token != nil {
		r.Header.Set("Authorization", "Bearer "+token())
	}
	res, err := client.Do(r)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 64<<20))
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", res.Status, strings.TrimSpace(string(body)))
	}
	return body, err
}

func channelSeekCommand() *cobra.Command {
	var b brokers
	var to, only string
	cmd := &cobra.Command{
		Use:   "seek TOPIC CHANNEL --to PLACE",
		Short: "Have a channel go on from another place",
		Long: `seek moves a channel of all brokers of the topic to the begin or the end of what they
have, to a time of publication (2026-01-02T15:04:05Z), or, on a single broker, to an
offset, and prints the offset from which each goes on. What the channel has in flight or
deferred it has no longer. What all channels have finished is there as long as nsqd
--retain or POST /topic/retain says. The loaddistributor orders it; brokers of no cluster
are asked at --nsqd-http-address.`,
		Example: `  srtm channel seek orders billing --to 2026-01-02T15:04:05Z`,
		Args:    topicAndChannel,
		RunE: func(cmd *cobra.Command, args []string) error {
			place, err := parsePlace(to)
			if err != nil {
				return err
			}
			type row struct {
				Broker string `json:"broker"`
				Offset uint64 `json:"offset"`
			}
			rows := []row{}
			if len(b.http) > 0 {
				if _, offset := place.GetTo().(*srtmv1.Place_Offset); only != "" || offset && len(b.http) > 1 {
					return usagef("--nsqd-http-address goes without --broker, and --to an offset with one broker: each counts its own")
				}
				q := url.Values{"topic": {args[0]}, "channel": {args[1]}, "to": {to}}
				err = b.ask(cmd, http.MethodPost, "/channel/seek", q, b.http, func(address string, body []byte) error {
					r := row{Broker: address}
					defer func() { rows = append(rows, r) }()
					return json.Unmarshal(body, &r)
				})
			} else {
				err = b.call(cmd, func(ctx context.Context, conn *grpc.ClientConn) error {
					r, err := srtmv1.NewAdminServiceClient(conn).SeekChannel(ctx, &srtmv1.SeekChannelRequest{Topic: args[0], Channel: args[1], To: place, BrokerId: only})
					errs := []error{err}
					for _, one := range r.GetBrokers() {
						if one.GetReason() == "" {
							rows = append(rows, row{one.GetBrokerId(), one.GetOffset()})
						} else {
							errs = append(errs, fmt.Errorf("broker %s: %s: %s", one.GetBrokerId(), one.GetReason(), one.GetError()))
						}
					}
					return errors.Join(errs...)
				})
			}
			if err != nil && len(rows) == 0 {
				return err
			}
			if b.output == formJSON {
				return errors.Join(err, writeJSON(cmd.OutOrStdout(), rows))
			}
			var cells [][]string
			for _, r := range rows {
				cells = append(cells, []string{r.Broker, strconv.FormatUint(r.Offset, 10)})
			}
			return errors.Join(err, table(cmd.OutOrStdout(), []string{"BROKER", "OFFSET"}, cells))
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "begin, end, a time as RFC 3339, or an offset: the `place`")
	cmd.Flags().StringVar(&only, "broker", "", "`id` of the one broker that is to do it; empty: all of the topic")
	b.flags(cmd)
	return cmd
}

func parsePlace(text string) (*srtmv1.Place, error) {
	switch text {
	case "begin":
		return &srtmv1.Place{To: &srtmv1.Place_Begin{Begin: &emptypb.Empty{}}}, nil
	case "end":
		return &srtmv1.Place{To: &srtmv1.Place_End{End: &emptypb.Empty{}}}, nil
	}
	if offset, err := strconv.ParseUint(text, 10, 64); err == nil {
		return &srtmv1.Place{To: &srtmv1.Place_Offset{Offset: offset}}, nil
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return nil, usagef("--to %q: want begin, end, a time such as 2026-01-02T15:04:05Z, or an offset", text)
	}
	return &srtmv1.Place{To: &srtmv1.Place_Time{Time: timestamppb.New(at)}}, nil
}

func channelPeekCommand() *cobra.Command {
	var b brokers
	var count int
	cmd := &cobra.Command{
		Use:   "peek TOPIC CHANNEL",
		Short: "Show the messages that a channel would get next, and take none",
		Args:  topicAndChannel,
		RunE: func(cmd *cobra.Command, args []string) error {
			addresses, err := b.of(cmd, args[0])
			if err != nil {
				return err
			}
			type message struct {
				Broker    string `json:"broker"`
				ID        string `json:"id"`
				Offset    uint64 `json:"offset"`
				Timestamp int64  `json:"timestamp"` // Unix ns
				Attempts  uint16 `json:"attempts"`
				Body      []byte `json:"body"`
			}
			all := []message{}
			q := url.Values{"topic": {args[0]}, "channel": {args[1]}, "count": {strconv.Itoa(count)}}
			err = b.ask(cmd, http.MethodGet, "/channel/peek", q, addresses, func(address string, body []byte) error {
				var r struct{ Messages []message }
				err := json.Unmarshal(body, &r)
				for _, m := range r.Messages {
					m.Broker = address
					all = append(all, m)
				}
				return err
			})
			if b.output == formJSON {
				return errors.Join(err, writeJSON(cmd.OutOrStdout(), all))
			}
			var cells [][]string
			for _, m := range all {
				cells = append(cells, []string{
					m.Broker, strconv.FormatUint(m.Offset, 10), time.Unix(0, m.Timestamp).UTC().Format(time.RFC3339Nano),
					strconv.Itoa(int(m.Attempts)), m.ID, strconv.Quote(string(m.Body)),
				})
			}
			return errors.Join(err, table(cmd.OutOrStdout(), []string{"BROKER", "OFFSET", "PUBLISHED", "ATTEMPTS", "ID", "BODY"}, cells))
		},
	}
	cmd.Flags().IntVar(&count, "count", 10, "`messages` of each broker, 1 to 1000; their bodies are at most 1 MiB in sum, beside the first")
	b.flags(cmd)
	return cmd
}
