package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// dnsperfModes are the protocols that dnsperf asks over, as it calls them.
var dnsperfModes = []string{"udp", "tcp"}

const (
	dnsperfLimit    = 30 * time.Second // of one run
	dnsperfDistinct = 1000             // questions in its file
	// dnsperfPending is how many questions wait for their answers at once, of
	// all clients together: dnsperf's default.
	dnsperfPending = 100
)

var dnsperfDone = regexp.MustCompile(`Queries completed:\s+(\d+)`)

// dnsperf asks every kind of question with dnsperf, a fixed number in all, and
// returns the microseconds of CPU that each cost the server, by protocol and
// kind. It returns nil where dnsperf is not installed.
func (b *bench) dnsperf(ctx context.Context, p *process, server netip.Addr, dir string, kinds []question) (map[string][]float64, error) {
	program, err := exec.LookPath("dnsperf")
	if errors.Is(err, exec.ErrNotFound) {
		b.say("dnsperf is not installed: its lines are left out")
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out := map[string][]float64{}
	for _, over := range dnsperfModes {
		for _, q := range kinds {
			cost, err := b.dnsperfOne(ctx, program, p, server, dir, over, q)
			if err != nil {
				return nil, fmt.Errorf("dnsperf over %s, %s: %w", over, q.name, err)
			}
			out[over] = append(out[over], cost)
		}
	}
	return out, nil
}

func (b *bench) dnsperfOne(ctx context.Context, program string, p *process, server netip.Addr, dir, over string, q question,
) (float64, error) {
	var lines strings.Builder
	for i := range dnsperfDistinct {
		name, kind := q.ask(i)
		fmt.Fprintf(&lines, "%s %s\n", name, dns.TypeToString[kind])
	}
	file := filepath.Join(dir, "questions")
	if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
		return 0, err
	}
	before, err := p.cpu()
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*dnsperfLimit)
	defer cancel()
	// EDNS, as resolvers have it: else 50 addresses do not fit into UDP.
	cmd := exec.CommandContext(ctx, program, "-s", server.String(), "-m", over, "-d", file, "-e",
		"-c", strconv.Itoa(dnsClients), "-q", strconv.Itoa(dnsperfPending),
		"-n", strconv.Itoa(b.few(50, 1)), "-l", strconv.Itoa(int(dnsperfLimit.Seconds())))
	text, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, text)
	}
	after, err := p.cpu()
	if err != nil {
		return 0, err
	}
	done := dnsperfDone.FindSubmatch(text)
	if done == nil {
		return 0, fmt.Errorf("unexpected output: %s", text)
	}
	completed, err := strconv.ParseFloat(string(done[1]), 64)
	if err != nil || completed == 0 {
		return 0, fmt.Errorf("no question was answered: %s", text)
	}
	return microseconds.in(after-before) / completed, nil
}
