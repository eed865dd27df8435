// Command iotpub emulates IoT publishers: thousands of connections from one
// process, sending on a schedule or replaying a recording, whatever the broker
// makes of it, and a subscriber that checks that every accepted message comes
// exactly once. It works against any NSQ broker, or where a loaddistributor
// places it. Read emulate next.
package main
