package preflight

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/fairlead/fairlead/internal/kernel/nftables"
)

// dropping returns the chains that drop what the machine forwards unless one of their rules accepts it, and of these the ones
// without rules.
func dropping() (all, empty []nftables.BaseChain, err error) {
	c, err := nftables.Dial()
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	if all, err = c.Dropping(nftables.Forward); err != nil {
		return nil, nil, err
	}
	for _, b := range all {
		rules, err := c.Rules(b.Table)
		if err != nil {
			return nil, nil, err
		}
		if len(rules[b.Name]) == 0 {
			empty = append(empty, b)
		}
	}
	return all, empty, nil
}

// DropsForwarded returns why the machine drops packets to and from Pods and Services: a policy that drops everything, or a rule of
// another program. The reason is one word, "" if nothing is known to drop them.
func DropsForwarded(ctx context.Context, p Packets) (reason, message string, err error) {
	_, empty, err := dropping()
	if err != nil {
		return "", "", err
	}
	if len(empty) == 0 {
		lost, err := foreign(ctx, p)
		if len(lost) > 0 {
			return "RuleDrop", lostText(lost), nil
		}
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, errMany) { // 'fairlead check' warns of it
			err = nil
		}
		return "", "", err
	}
	return "PolicyDrop", fmt.Sprintf("%s has the policy drop and no rules, so the machine forwards no packets: "+
		"accept the ranges of Pods there, or set "+
		"the policy accept (iptables -P FORWARD ACCEPT)", empty[0]), nil
}

// remedyOf returns what to do about a loss, and the program that lists the rules.
func remedyOf(lost string) string {
	list := "nft -a list ruleset"
	switch legacy := strings.Contains(lost, legacyMark); {
	case legacy && strings.Contains(lost, "of table ip6 "):
		list = "ip6tables-legacy-save"
	case legacy:
		list = "iptables-legacy-save"
	}
	if strings.Contains(lost, policyDrop) {
		return "set it to ACCEPT, or accept the ranges of Pods there (" + list + ")"
	}
	return "remove it, or accept the ranges of Pods and Services before it (" + list + ")"
}

// lostText names the first loss, and how many more there are.
func lostText(lost []string) string {
	text := lost[0]
	if more := len(lost) - 1; more > 0 {
		text += fmt.Sprintf(", and %d more reasons", more)
	}
	return text + ": " + remedyOf(lost[0])
}

// rules looks for rules of other programs that drop packets of Pods and Services.
func (m Machine) rules(ctx context.Context) (out []Finding) {
	lost, err := foreign(ctx, Packets{Ranges: m.Ranges, Pods: m.Pods, DNSPort: m.DNSPort})
	switch {
	case errors.Is(err, exec.ErrNotFound):
		out = append(out, Finding{"forwarding", Warning, "there are rules of iptables-legacy, and no program to read them: " + oneLine(err),
			"install iptables-legacy, or look whether these rules drop packets of Pods"})
	case errors.Is(err, errMany):
		out = append(out, Finding{"forwarding", Warning, err.Error(),
			"look at 'nft list ruleset' and 'iptables-legacy-save' for rules that drop packets of Pods"})
	case err != nil:
		out = append(out, Finding{"forwarding", Warning, "cannot look for all rules that drop packets: " + oneLine(err),
			"look at 'nft list ruleset'"})
	}
	for _, text := range lost[:min(len(lost), maxFindings)] {
		out = append(out, Finding{"forwarding", Warning, text, remedyOf(text)})
	}
	return out
}

// maxFindings bounds how many rules are named.
const maxFindings = 5

// policies looks for chains that drop what they do not accept.
func policies() (out []Finding) {
	all, empty, err := dropping()
	if err != nil {
		return []Finding{{"forwarding", Warning, "cannot look for chains that drop packets: " + oneLine(err), "look at 'nft list ruleset'"}}
	}
	const remedy = "accept the ranges of Pods there, or set the policy accept (iptables -P FORWARD ACCEPT)"
	for _, b := range all {
		level, what := Warning, " drops forwarded packets that none of its rules accepts"
		for _, e := range empty {
			if e == b {
				level, what = Error, " has the policy drop and no rules: the machine forwards no packets"
			}
		}
		out = append(out, Finding{"forwarding", level, b.String() + what, remedy})
	}
	return out
}
