package main

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
)

func brokerCommand() *cobra.Command {
	return parent("broker", "The brokers of a cluster", "",
		brokerListCommand(), brokerDrainCommand(), brokerCapacityCommand(), brokerCalibrateCommand(), brokerRemoveCommand())
}

// drainPause is the pause between two checks of a draining broker.
const drainPause = 200 * time.Millisecond

func brokerDrainCommand() *cobra.Command {
	var r srtmv1.DrainBrokerRequest
	var wait bool
	cmd := leaf(&cobra.Command{
		Use:   "drain BROKER",
		Short: "Move all topics from a broker",
		Long: `drain has nothing new placed on the broker, and moves the publishers of its
topics to others. A topic is gone from it once its consumers have had what it
still holds. What fits nowhere else stays. It prints what it waits for and what would
end the wait, and "safe to stop" once nothing is on the broker any more.

--force has it end, whatever it costs: topics that fit nowhere else go beyond the
capacity of the other brokers, which degrades them, and messages that are left on
the broker are lost once no client has published there and no consumer has been given
one for 10 s (the loaddistributor's --window).`,
		Args: oneBroker,
		PreRunE: func(_ *cobra.Command, args []string) error {
			if r.BrokerId = args[0]; r.Undo && (wait || r.Force) {
				return usagef("--undo excludes --wait and --force")
			}
			return nil
		},
	}, func(x *call) error {
		drained, err := x.admin.DrainBroker(x.ctx, &r)
		b := drained.GetBroker()
		if err == nil && wait {
			b, err = x.emptied(b)
		}
		safe := ""
		if b.GetSafeToStop() {
			safe = "safe to stop " + b.GetId() + "\n"
		}
		return x.print(b, err, "broker %s: draining %v, topics on it: %d\n%s%s", b.GetId(), b.GetDraining(), len(b.GetTopics()), waits(b), safe)
	})
	cmd.Flags().BoolVar(&r.Undo, "undo", false, "end a drain: place on the broker again")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until it is safe to stop, within --timeout")
	cmd.Flags().BoolVar(&r.Force, "force", false, "overload the other brokers and lose messages rather than wait")
	return cmd
}

// waits lists the reasons why a drain waits, one line per topic.
func waits(b *srtmv1.Broker) string {
	var s strings.Builder
	for _, w := range b.GetWaits() {
		fmt.Fprintf(&s, "  waits for %s: %s\n", cmp.Or(w.GetTopic(), "the broker"), w.GetReason())
		if w.GetRemedy() != "" {
			fmt.Fprintf(&s, "    what helps: %s\n", w.GetRemedy())
		}
	}
	return s.String()
}

// emptied waits until nothing is on the broker, and prints the reasons when they change.
func (x *call) emptied(b *srtmv1.Broker) (*srtmv1.Broker, error) {
	ticker := time.NewTicker(drainPause)
	defer ticker.Stop()
	for said := ""; ; {
		if len(b.GetTopics())+len(b.GetWaits()) == 0 {
			return b, nil
		}
		if now := waits(b); now != said {
			said = now
			if _, err := fmt.Fprint(x.cmd.ErrOrStderr(), said); err != nil {
				return nil, err
			}
		}
		select {
		case <-ticker.C:
		case <-x.ctx.Done():
		}
		r, err := x.admin.ListBrokers(x.ctx, &srtmv1.ListBrokersRequest{})
		switch {
		case x.ctx.Err() != nil || status.Code(err) == codes.DeadlineExceeded:
			return nil, fmt.Errorf("topics still on broker %s: %s\n%s", b.GetId(), strings.Join(b.GetTopics(), ", "), strings.TrimSuffix(waits(b), "\n"))
		case err != nil:
			return nil, err
		}
		b = cmp.Or(brokerOf(r, b.GetId()), b)
	}
}

// brokerOf returns the broker with the id, or nil.
func brokerOf(r *srtmv1.ListBrokersResponse, id string) *srtmv1.Broker {
	for _, b := range r.GetBrokers() {
		if b.GetId() == id {
			return b
		}
	}
	return nil
}

// refusedProcess names a process that was refused a broker's id.
func refusedProcess(r *srtmv1.RefusedProcess) string {
	return fmt.Sprintf("nsqd at %s (host %s, %s) %v ago", r.GetTcpAddress(), r.GetHostname(), r.GetDataPath(), time.Since(r.GetLast().AsTime()).Round(time.Second))
}

// maxMcap is the maximum capacity of the API, msg/s.
const maxMcap = 1_000_000_000

func brokerCapacityCommand() *cobra.Command {
	var mcap int64
	var unset bool
	cmd := leaf(&cobra.Command{
		Use:   "capacity BROKER",
		Short: "Set what a broker carries within the SLO",
		Long: `capacity gives the broker an mcap that stands over the one it is configured with
(nsqd --mcap), until it is unset. Topics with more allocated are degraded.`,
		Args: oneBroker,
		PreRunE: func(*cobra.Command, []string) error {
			if unset == (mcap != 0) {
				return usagef("want either --mcap or --unset")
			}
			if mcap < 0 || mcap > maxMcap {
				return usagef("--mcap %d: want 1 to %d", mcap, int64(maxMcap))
			}
			return nil
		},
	}, func(x *call) error {
		r, err := x.admin.SetBrokerCapacity(x.ctx, &srtmv1.SetBrokerCapacityRequest{BrokerId: x.args[0], Mcap: mcap})
		b := r.GetBroker()
		return x.print(b, err, "broker %s: mcap %d msg/s, configured %d\n", b.GetId(), b.GetMcap(), b.GetConfiguredMcap())
	})
	cmd.Flags().Int64Var(&mcap, "mcap", 0, "maximum rate within the SLO, in `msg/s`")
	cmd.Flags().BoolVar(&unset, "unset", false, "go back to what the broker is configured with")
	return cmd
}

func brokerRemoveCommand() *cobra.Command {
	return leaf(&cobra.Command{
		Use:   "remove BROKER",
		Short: "Remove a dead broker",
		Long: `remove declares that a broker is dead and will not come back with what it holds: its
shares go to others, as with "share forget", and what it may still have of topics
that have moved away from it is given up. It shows both. A broker that is connected
is refused (stop it first), and so is one that topics are placed on: they move away
by themselves as far as others have room, after --evacuate-after of the
loaddistributor.

Should the broker come back, it is refused once, gives up what it holds, and joins as a
new one. If it was alive and only cut off, contracts were exceeded by its bases until
then.`,
		Args: oneBroker,
	}, func(x *call) error {
		r, err := x.admin.RemoveBroker(x.ctx, &srtmv1.RemoveBrokerRequest{BrokerId: x.args[0]})
		return x.show(r, err, func() error {
			if err := freedTable(x.out, x.args[0], r.GetFreed()); err != nil || len(r.GetLeft()) == 0 {
				return err
			}
			_, err := fmt.Fprintf(x.out, "what it may still have of these topics is given up: %s\n", strings.Join(r.GetLeft(), ", "))
			return err
		})
	})
}

func brokerListCommand() *cobra.Command {
	return leaf(&cobra.Command{
		Use:   "list",
		Short: "List the brokers, by id",
		Long: `list shows every broker that has joined: the addresses that clients dial ("-": it does
not listen for MQTT, or for MQTT with TLS), its capacity mcap and what of it is
allocated to topics, both in msg/s, and whether its session is up. "mcap set" means
that its capacity was set (calibrate, capacity), and is not what it is configured
with. "refused" names a process that sent a hello with the id of the broker within the last
ten minutes, while the id belonged to another process.`,
	}, func(x *call) error {
		r, err := x.admin.ListBrokers(x.ctx, &srtmv1.ListBrokersRequest{})
		return list(x, r.GetBrokers(), err, "BROKER\tTCP\tHTTP\tMQTT\tMQTTS\tMCAP\tALLOCATED\tFREE\tSTATE\tVERSION", func(b *srtmv1.Broker) []any {
			state := "connected"
			if !b.GetConnected() {
				state = "gone"
			}
			switch {
			case b.GetSafeToStop():
				state += ", safe to stop"
			case b.GetForced():
				state += ", draining by force"
			case b.GetDraining():
				state += ", draining"
			}
			if b.GetCalibratedMcap() != 0 {
				state += ", mcap set"
			}
			if r := b.GetRefused(); r != nil {
				state += ", refused " + refusedProcess(r)
			}
			mqtt, mqtts := cmp.Or(b.GetMqttAddress(), "-"), cmp.Or(b.GetMqttsAddress(), "-")
			return []any{b.GetId(), b.GetTcpAddress(), b.GetHttpAddress(), mqtt, mqtts, b.GetMcap(), b.GetAllocated(), b.GetMcap() - b.GetAllocated(), state, b.GetVersion()}
		})
	})
}
