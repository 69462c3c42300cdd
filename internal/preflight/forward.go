package preflight

import (
	"fmt"

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

// DropsForwarded returns why the machine drops every packet to and from Pods of other machines, "" if it does not, or drops
// only some.
func DropsForwarded() (string, error) {
	_, empty, err := dropping()
	if err != nil || len(empty) == 0 {
		return "", err
	}
	return fmt.Sprintf("%s has the policy drop and no rules, so the machine forwards no packets: accept the ranges of Pods there, or set "+
		"the policy accept (iptables -P FORWARD ACCEPT)", empty[0]), nil
}

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
