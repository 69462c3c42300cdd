package status

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
)

// authorityNotice is how long before its end an authority counts as a problem: nothing replaces it by itself, and that takes time.
const authorityNotice = 90 * 24 * time.Hour

// judgeMembers adds servers of the cluster that do not answer, and reports whether they have a quorum. list is empty where the cluster
// has one server, or an etcd that is not fairlead's. has asks the server that was reached for a quorum: this machine may reach no
// other one, for example behind a virtual address.
func (r *Report) judgeMembers(list []members.Member, has func() bool) (quorum bool) {
	var silent, all []string
	leader := false
	for _, m := range list {
		if m.Role == members.RoleLearner {
			continue
		}
		all = append(all, m.Name)
		if m.Status == nil {
			silent = append(silent, m.Name)
			continue
		}
		leader = leader || m.Status.Leader != ""
	}
	most := len(all)/2 + 1
	answer := len(all) - len(silent)
	switch {
	case len(all) == 0:
		return true
	case (answer < most || !leader) && has():
		if len(silent) > 0 {
			r.problem("some servers could not be asked from this machine, but they have a quorum: %s", strings.Join(silent, ", "))
		}
		return true
	case answer < most:
		r.problem("no quorum: %d of %d servers answer, %d have to: nothing can be read or written; start %s again, or see "+
			"docs/reliability.md for servers that are lost", answer, len(all), most, strings.Join(silent, ", "))
		return false
	case !leader:
		r.problem("the servers have no leader: %d of %d answer; look at the network between them", answer, len(all))
		return false
	}
	for _, name := range silent {
		r.problem("server %s does not answer: %d of %d do, and nothing is written when fewer than %d do", name, answer, len(all), most)
	}
	return true
}

// hasQuorum reports whether the server that client reaches has a quorum, as its own check says.
func hasQuorum(ctx context.Context, client kubernetes.Interface) bool {
	ctx, cancel := context.WithTimeout(ctx, membersTimeout)
	defer cancel()
	_, err := client.CoreV1().RESTClient().Get().AbsPath("/readyz/etcd-quorum").MaxRetries(0).DoRaw(ctx)
	return err == nil
}

// askCertificates gets the certificates of the cluster, which only fairlead's server tells.
func (r *Report) askCertificates(ctx context.Context, client kubernetes.Interface, now time.Time) {
	text, err := client.CoreV1().RESTClient().Get().AbsPath(certs.Path).DoRaw(ctx)
	var s certs.Status
	if err == nil && json.Unmarshal(text, &s) == nil {
		r.judgeCertificates(&s, now)
	}
}

// judgeCertificates adds certificates that end soon: what is renewed by itself should have been long before.
func (r *Report) judgeCertificates(s *certs.Status, now time.Time) {
	for i, a := range s.Authorities {
		if i == 0 && a.Ends.Sub(now) < min(authorityNotice, a.Ends.Sub(a.Begins)/4) { // another one is about to go, or to come
			r.problem("the cluster's authority %s %s: replace it with 'fairlead certs rotate-ca'", a.Subject, endText(a.Ends, now))
		}
	}
	for _, c := range s.Certificates {
		if isLate(c, now) {
			r.problem("certificate %s of server %s %s and was not renewed: see its log, and 'fairlead certs renew %s'", c.Name, s.Server,
				endText(c.Ends, now), c.Name)
		}
	}
	for _, o := range s.Others {
		if !o.Ends.IsZero() && o.Ends.Sub(now) < pki.RenewBefore/2 {
			r.problem("the certificate of %s %s and was not renewed: see the log there", o.Holder, endText(o.Ends, now))
		}
	}
}

// isLate reports whether a certificate has less left than half of what is left when it should be renewed.
func isLate(c pki.File, now time.Time) bool {
	return c.Ends.Sub(now) < min(pki.RenewBefore, c.Ends.Sub(c.Begins)/3)/2
}

// endText is such as "ends in 3 days".
func endText(ends, now time.Time) string {
	left := ends.Sub(now)
	switch {
	case left <= 0:
		return "ended " + (-left).Round(time.Minute).String() + " ago"
	case left < 48*time.Hour:
		return "ends in " + left.Round(time.Minute).String()
	}
	return fmt.Sprintf("ends in %d days", int(left.Hours()/24))
}
