package testbed

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// changing matches lines that differ although nothing has changed: comments with
// the time, counts, the rest of a lifetime, and parameters that belong to the whole machine.
var changing = regexp.MustCompile(
	`^(#|net\.netfilter\.nf_conntrack_(count|buckets|max|expect_max)|net\.nf_conntrack_max|net\.core\.|net\.unix\.)`)

// KernelState returns, line by line, what a network namespace has: rules, devices,
// addresses, routes and parameters. command makes a command that runs there.
func KernelState(t testing.TB, command func(name string, args ...string) *exec.Cmd) (lines []string) {
	t.Helper()
	for _, args := range []string{
		"nft list ruleset", "iptables-save", "ip6tables-save", "ip -o link", "ip -o addr", "ip rule", "ip -6 rule",
		"ip route show table all", "ip -6 route show table all", `sysctl -a --pattern ^net\.`,
	} {
		f := strings.Fields(args)
		out, err := command(f[0], f[1:]...).Output()
		if err != nil {
			t.Fatalf("%s: %v", args, err)
		}
		for line := range strings.Lines(string(out)) {
			if !changing.MatchString(line) {
				lines = append(lines, strings.TrimSpace(line))
			}
		}
	}
	return lines
}
