// Package compare asks DNS servers the same questions, and compares their answers, for 'fairlead migrate'.
package compare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Options are the options of Run.
type Options struct {
	// Servers are asked over UDP and TCP, and compared with Like.
	Servers   []netip.AddrPort
	Like      netip.AddrPort
	Questions []Question
	// Within is how long answers may differ, since the servers learn of a change one after the other.
	Within time.Duration
}

// Question is a question to a server.
type Question struct {
	Name string
	Type uint16
}

// ParseQuestion reads NAME/TYPE.
func ParseQuestion(text string) (Question, error) {
	name, kind, ok := strings.Cut(text, "/")
	t, known := dns.StringToType[kind]
	if _, valid := dns.IsDomainName(name); !ok || !known || !valid || name == "" {
		return Question{}, fmt.Errorf("%q is not a question; want NAME/TYPE, such as kubernetes.default.svc.cluster.local/A", text)
	}
	return Question{dns.Fqdn(name), t}, nil
}

func (q Question) String() string { return q.Name + "/" + dns.TypeToString[q.Type] }

const (
	// attempts are this far apart.
	attempts = time.Second
	// requestTimeout bounds one question.
	requestTimeout = 3 * time.Second
	// maxDifferences bounds how many an error names, and for how many the servers are asked.
	maxDifferences = 3
)

// Run returns nil as soon as all answers are equal, or after Within an error that names differences.
func Run(ctx context.Context, o Options) error {
	ctx, cancel := context.WithTimeout(ctx, o.Within)
	defer cancel()
	again := time.NewTicker(attempts)
	defer again.Stop()
	var last error
	end, _ := ctx.Deadline()
	for {
		whole := time.Until(end) > requestTimeout // otherwise a question may be cut off
		err := once(ctx, o)
		if err == nil {
			return nil
		}
		if last == nil || whole {
			last = err
		}
		select {
		case <-ctx.Done():
			return last
		case <-again.C:
		}
	}
}

// once asks every server every question, until there are enough differences. A server that does not answer is one, and is not
// asked again.
func once(ctx context.Context, o Options) error {
	var differences []string
	silent := map[netip.AddrPort]bool{}
	for _, q := range o.Questions {
		want, err := ask(ctx, "udp", o.Like, q)
		if err != nil {
			return fmt.Errorf("the reference server %s does not answer: %w", o.Like, err)
		}
		for _, s := range o.Servers {
			for _, network := range []string{"udp", "tcp"} {
				if silent[s] {
					continue
				}
				got, err := ask(ctx, network, s, q)
				switch {
				case err != nil:
					silent[s] = true
					differences = append(differences, err.Error())
				case got != want:
					differences = append(differences, fmt.Sprintf("%s: %s over %s has %s; %s has %s", q, s, network, got, o.Like, want))
				}
			}
		}
		if len(differences) >= maxDifferences {
			break
		}
	}
	switch more := len(differences) - maxDifferences; {
	case len(differences) == 0:
		return nil
	case more > 0:
		return fmt.Errorf("%s; and %d more", strings.Join(differences[:maxDifferences], "; "), more)
	}
	return errors.New(strings.Join(differences, "; "))
}

// ask returns the code and the records of an answer in a form in which equal ones are equal: without TTLs, and sorted, since
// servers turn the order.
func ask(ctx context.Context, network string, server netip.AddrPort, q Question) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout) // the client's own Timeout does not count beside a deadline
	defer cancel()
	m := new(dns.Msg).SetQuestion(q.Name, q.Type)
	m.SetEdns0(dns.DefaultMsgSize, false)
	client := &dns.Client{Net: network}
	answer, _, err := client.ExchangeContext(ctx, m, server.String())
	if err == nil && answer.Truncated && network == "udp" {
		return ask(ctx, "tcp", server, q)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %s over %s: %w", q, server, network, err)
	}
	var records []string
	for _, r := range answer.Answer {
		r = dns.Copy(r)
		r.Header().Ttl = 0
		records = append(records, strings.ToLower(strings.Join(strings.Fields(r.String()), " ")))
	}
	slices.Sort(records)
	return dns.RcodeToString[answer.Rcode] + " [" + cmp.Or(strings.Join(records, ", "), "no records") + "]", nil
}
