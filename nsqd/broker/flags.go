package broker

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/faults"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/tokenbucket"
)

// ContractFlags defines the flags of contracts and pacing.
func (c *Config) ContractFlags(fs *flag.FlagSet) {
	fs.Func("topic-limit", "contract of a topic of a standalone broker, as `topic:rate:burst[:delay|reject]` in msg/s and messages; its bucket is empty at the start, and whenever the topic is created anew; may be repeated", c.preset)
	fs.DurationVar(&c.MaxBackdating, "max-backdating", 250*time.Millisecond, "how far before its release a message may have had its token, at most 1s: with rate r and burst b, at most b + r*(t + this) messages leave in any time t. A stall of the broker up to this long delays no conforming message; after a longer stall the contract in real time comes first")
	fs.DurationVar(&c.RejectAfter, "reject-after", 0, "with policy reject: refuse a message whose access delay would be longer; 0: one that would have to wait at all")
	fs.StringVar((*string)(&c.Pacing), "pacing", string(PaceAdvise), "`mode` of topics with a contract and without a mode of their own: off (for all topics); advise (while more arrives than the contract allows, publishers that send PACE receive their rate, by weight); or police (the broker also refuses messages beyond this rate, from all publishers)")
	fs.IntVar(&c.MaxWeight, "max-weight", 1, "maximum `weight`, 1 to 255, of a publisher without a weight from its topic")
}

// LimitFlags defines the flags of the broker's limits.
func (c *Config) LimitFlags(fs *flag.FlagSet) {
	fs.Int64Var(&c.MaxMemory, "max-memory-bytes", 0, "maximum size of all messages held in memory, in `bytes`, each message counted as its body plus 256; a topic that holds more than four times the remaining bytes writes further messages to disk (default half of the memory limit)")
	fs.IntVar(&c.MaxTopics, "max-topics", 50_000, "maximum number of `topics`, 0: no limit; one more is refused (E_PUB_FAILED or E_SUB_FAILED, HTTP 503); topics on disk at the start are always opened")
	fs.IntVar(&c.MaxTopicChannels, "max-topic-channels", 10_000, "maximum number of `channels` of a topic, 0: no limit; as --max-topics")
	fs.IntVar(&c.MaxChannels, "max-channels", 100_000, "maximum number of `channels` of all topics, 0: no limit; as --max-topics")
	fs.IntVar(&c.MaxChannelConsumers, "max-channel-consumers", 0, "maximum number of `consumers` of a channel (default no limit)")
}

// CheckFlags returns the problems of the flags' values that Validate accepts.
func (c *Config) CheckFlags() error {
	var errs faults.List
	errs.Add(faults.OneOf("pacing", string(c.Pacing), string(PaceOff), string(PaceAdvise), string(PacePolice)))
	errs.If(c.MaxWeight == 0, "--max-weight 0: want 1 to %d", math.MaxUint8)
	return errs.Err()
}

// preset adds the contract "topic:rate:burst[:delay|reject]" of a topic. The last contract of a topic
// counts.
func (c *Config) preset(s string) error {
	parts := strings.Split(s, ":")
	if len(parts) != 3 && len(parts) != 4 {
		return errors.New("want topic:rate:burst or topic:rate:burst:policy")
	}
	topic := parts[0]
	if !wire.ValidTopicName(topic) {
		return fmt.Errorf("topic %q is not a valid name", topic)
	}
	rate, err := strconv.ParseFloat(parts[1], 64)
	if err != nil {
		return fmt.Errorf("rate %q is not a number of messages per second", parts[1])
	}
	contract := metadata.Contract{RateMilli: int64(tokenbucket.PerSecond(rate))}
	if contract.Burst, err = strconv.ParseInt(parts[2], 10, 64); err != nil {
		return fmt.Errorf("burst %q is not a number of messages", parts[2])
	}
	if err := contract.Share().Validate(); err != nil {
		return err
	}
	if contract.Share().IsZero() {
		return errors.New("a rate and a burst of 0 would stop the topic")
	}
	if len(parts) == 4 {
		switch parts[3] {
		case "delay":
		case "reject":
			contract.Reject = true
		default:
			return fmt.Errorf("policy %q is neither delay nor reject", parts[3])
		}
	}
	if c.Presets == nil {
		c.Presets = map[string]metadata.Contract{}
	}
	c.Presets[topic] = contract
	return nil
}

// Flags defines the flags of files of messages.
func (c *StorageConfig) Flags(fs *flag.FlagSet) {
	fs.Int64Var(&c.SegmentBytes, "max-bytes-per-file", commitlog.DefaultSegmentBytes, "size at which a file of messages is full, in `bytes`")
	fs.IntVar(&c.MaxUnfinished, "max-unfinished", 1_000_000, "how far a channel continues past its oldest unfinished message, in `messages`; the channel then gets no more messages until that message is finished; other channels continue; 0: no limit")
	fs.Int64Var(&c.MaxLogBytes, "max-log-bytes", 0, "size of a topic's log on disk, in `bytes`, from which publishes are refused (E_QUEUE_FULL, HTTP 503); messages that are only retained do not count; 0: no limit")
	fs.Var(&c.Retain, "retain", "`time or size` of finished messages that stay on disk for channel/seek: a duration (24h), a size (10GB, or up to a file of --max-bytes-per-file more), or both with a comma, until either is exceeded; POST /topic/retain sets it for one topic. Unfinished messages stay in any case (default 0: nothing)")
	fs.IntVar(&c.OpenFiles, "open-files-per-topic", commitlog.DefaultOpenFiles, "maximum number of a topic's message `files` that stay open for reading, beside the file being written; opening one more closes another")
	fs.IntVar(&c.ReadAhead, "read-ahead-bytes", DefaultReadAhead, "maximum size of the messages that are read from disk at a time for a topic or channel that is behind, and that stay in memory for channels close behind it, in `bytes`; a larger message is read alone")
}

// CheckFlags returns all problems of the flags' values.
func (c *StorageConfig) CheckFlags() error {
	var errs faults.List
	errs.If(c.SegmentBytes < 1<<10, "--max-bytes-per-file %d is less than %d", c.SegmentBytes, 1<<10)
	errs.If(c.MaxUnfinished < 0, "--max-unfinished %d is negative", c.MaxUnfinished)
	errs.If(c.MaxLogBytes < 0, "--max-log-bytes %d is negative", c.MaxLogBytes)
	errs.If(c.MaxRecord > commitlog.LargestBody, "--max-msg-size %d is more than %d", c.MaxRecord, commitlog.LargestBody)
	errs.Add(faults.Within("open-files-per-topic", c.OpenFiles, 1, 1000))
	errs.Add(faults.Within("read-ahead-bytes", c.ReadAhead, 1<<10, 1<<30))
	return errs.Err()
}
