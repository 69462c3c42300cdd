package nodecheck

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Sessions returns when this machine has had a TCP connection with each of the routers for a while, the same one all the time, or an
// error after the time within.
func Sessions(ctx context.Context, routers []netip.AddrPort, hold, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within+hold)
	defer cancel()
	again := time.NewTicker(200 * time.Millisecond)
	defer again.Stop()
	since := map[connection]time.Time{}
	for {
		now, err := connections(routers)
		if err != nil {
			return err
		}
		missing := waiting(routers, now, since, hold)
		if missing == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s (waited %s)", missing, within)
		case <-again.C:
		}
	}
}

// connection is an established TCP connection.
type connection struct{ local, remote netip.AddrPort }

// waiting notes since when connections are there, and returns what is missing until every router has one that is old enough.
func waiting(routers []netip.AddrPort, now []connection, since map[connection]time.Time, hold time.Duration) string {
	for c := range since {
		if !slices.Contains(now, c) {
			delete(since, c)
		}
	}
	for _, c := range now {
		if _, known := since[c]; !known {
			since[c] = time.Now()
		}
	}
	for _, r := range routers {
		oldest := time.Duration(-1)
		for c, begun := range since {
			if c.remote == r {
				oldest = max(oldest, time.Since(begun))
			}
		}
		switch {
		case oldest < 0:
			return fmt.Sprintf("there is no connection with the router %s", r)
		case oldest < hold:
			return fmt.Sprintf("the connection with the router %s is younger than %s", r, hold)
		}
	}
	return ""
}

// connections reads the established connections of this network namespace with routers.
func connections(routers []netip.AddrPort) (out []connection, err error) {
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(file)
		if os.IsNotExist(err) { // without IPv6
			continue
		}
		if err != nil {
			return nil, err
		}
		more, err := parseConnections(f, routers)
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		out = append(out, more...)
	}
	return out, nil
}

// established is the state in such a file.
const established = "01"

// parseConnections reads such a file. A node may have very many other connections.
func parseConnections(in io.Reader, routers []netip.AddrPort) (out []connection, err error) {
	lines := bufio.NewScanner(in)
	lines.Scan() // the names of the columns
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 4 || f[3] != established {
			continue
		}
		remote, err := parseEnd(f[2])
		if err == nil && !slices.Contains(routers, remote) {
			continue
		}
		local, localErr := parseEnd(f[1])
		if err != nil || localErr != nil {
			return nil, fmt.Errorf("cannot read %q", lines.Text())
		}
		out = append(out, connection{local, remote})
	}
	return out, lines.Err()
}

// parseEnd reads an address, words of 32 bits in the order of the machine, which is little-endian, and a port.
func parseEnd(text string) (end netip.AddrPort, err error) {
	words, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(words)
	if err != nil {
		return end, err
	}
	for i := 0; i+4 <= len(raw); i += 4 {
		slices.Reverse(raw[i : i+4])
	}
	addr, ok := netip.AddrFromSlice(raw)
	if !ok {
		return end, fmt.Errorf("%q is no address", words)
	}
	n, err := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), err
}
