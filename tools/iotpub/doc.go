// Command iotpub emulates IoT publishers. One process opens thousands of connections and
// sends on a schedule or replays a recording, regardless of the broker's replies. A
// subscriber checks that every accepted message is delivered exactly once. iotpub works
// against any NSQ broker. With a loaddistributor, each publisher connects to its assigned
// broker. Read emulate next.
package main
