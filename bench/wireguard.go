package main

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"strconv"
)

// wireguardLine is what the test logs of what two nodes carry.
var wireguardLine = regexp.MustCompile(`between addresses of (\S+) WireGuard carries (\S+) MB/s, plain routes (\S+) MB/s`)

// runWireGuard runs the test of package kernel/link on a machine whose kernel has WireGuard.
func (b *bench) runWireGuard(ctx context.Context) ([]figure, error) {
	out, log, err := b.guest(ctx, "wireguard")
	if err != nil {
		return nil, err
	}
	if !bytes.Contains(out, []byte("--- PASS: TestWireGuard")) {
		return nil, fmt.Errorf("the test did not pass: see %s", log)
	}
	var figures []figure
	for _, found := range wireguardLine.FindAllSubmatch(out, -1) {
		var carried [2]float64
		for i := range carried {
			if carried[i], err = strconv.ParseFloat(string(found[i+2]), 64); err != nil {
				return nil, err
			}
		}
		figures = append(figures, figure{
			what: fmt.Sprintf("bytes between two nodes, by the kernel's WireGuard between addresses of %s", found[1]),
			unit: megabytesPerSecond, fairlead: carried[0], peer: carried[1], peerName: "plain routes",
		})
	}
	if len(figures) == 0 {
		err = fmt.Errorf("the test measured nothing: see %s", log)
	}
	return figures, err
}
