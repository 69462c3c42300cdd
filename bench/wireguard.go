package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
)

// wireguardLine is what the test logs of what two nodes carry.
var wireguardLine = regexp.MustCompile(`between addresses of (\S+) WireGuard carries (\S+) MB/s, plain routes (\S+) MB/s`)

// runWireGuard runs the tests of packages kernel/link and test/node on a machine whose kernel has WireGuard.
func (b *bench) runWireGuard(ctx context.Context) ([]figure, error) {
	var out []byte
	for _, t := range []struct{ name, initrd, test string }{{"agents", "agents", "TestEncrypt"}, {"wireguard", "initrd", "TestWireGuard"}} {
		var log string
		var err error
		if out, log, err = b.guest(ctx, t.name, t.initrd); err != nil {
			return nil, err
		}
		if !bytes.Contains(out, []byte("--- PASS: "+t.test)) {
			return nil, fmt.Errorf("%s did not pass: see %s", t.test, log)
		}
	}
	var figures []figure
	for _, found := range wireguardLine.FindAllSubmatch(out, -1) {
		var carried [2]float64
		for i := range carried {
			var err error
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
		return nil, errors.New("TestWireGuard measured nothing: see the logs (--keep)")
	}
	return figures, nil
}
