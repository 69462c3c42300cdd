package access

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/fairlead/fairlead/internal/apiserver/certs"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/registry/certificate"
	"github.com/fairlead/fairlead/internal/svc"
)

// Times of the signer. Requests are kept for a while so that users can see them.
const (
	signTimeout   = 30 * time.Second
	keepIssued    = time.Hour
	keepPending   = 24 * time.Hour
	sweepPeriod   = 10 * time.Minute
	nameInUseWait = time.Second
	// noRightWait is when a request is looked at again whose user has no right to an approval: a server that has just
	// started may not know the user's Node or roles yet.
	noRightWait = 5 * time.Second
	// registerWithin is the time from a certificate to its node's first Lease in
	// which the name is not given to another machine.
	registerWithin = time.Minute

	// joinBurst is how many machines join at once without an administrator's approval, and joinPeriod how soon each one from
	// then on; further ones wait for joinWait and try again.
	joinBurst  = 10
	joinPeriod = 2 * time.Second
	joinWait   = time.Second
	// joinLease is a Lease of kube-system, in which all servers keep that rate (takeJoin), keptRequests how many of the
	// last requests it names.
	joinLease    = "fairlead-joining-machines"
	keptRequests = 2 * joinBurst
)

// signer approves the certificate requests of nodes and signs what is
// approved for the two signers of clients of this server.
type signer struct {
	*nodeRequests
	informer   cache.SharedIndexInformer
	authorizer authorizer.UnconditionalAuthorizer
	removed    *removedNodes
	pki        *pki.Directory
	log        *slog.Logger
	failures   loop.Failures
	warned     map[string]bool // requests that were logged as waiting; of run's worker
}

func newSigner(
	r *nodeRequests, f informers.SharedInformerFactory, a authorizer.UnconditionalAuthorizer, removed *removedNodes, p *pki.Directory,
	log *slog.Logger,
) *signer {
	return &signer{nodeRequests: r, informer: f.Certificates().V1().CertificateSigningRequests().Informer(), authorizer: a, removed: removed,
		pki: p, log: log, warned: map[string]bool{}}
}

// run works until ctx ends.
func (s *signer) run(ctx context.Context) {
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](20*time.Millisecond, 30*time.Second))
	add := func(o any) { queue.Add(o.(*certificatesv1.CertificateSigningRequest).Name) }
	handle, err := s.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: add, UpdateFunc: func(_, o any) { add(o) }})
	if err != nil {
		return // the informer has ended, and so has the server
	}
	defer func() { _ = s.informer.RemoveEventHandler(handle) }()
	var workers sync.WaitGroup
	workers.Go(func() {
		for {
			name, stop := queue.Get()
			if stop {
				return
			}
			wait, err := s.sync(ctx, name)
			switch {
			case err != nil && ctx.Err() == nil:
				s.failures.Log(s.log, queue.NumRequeues(name), err, "cannot handle a certificate request; retrying", "request", name)
				queue.AddRateLimited(name)
			case wait > 0:
				queue.AddAfter(name, wait)
			default:
				queue.Forget(name)
			}
			queue.Done(name)
		}
	})
	workers.Go(func() { s.sweep(ctx) })
	<-ctx.Done()
	queue.ShutDown()
	workers.Wait()
}

// sync takes the next step with a request. wait is when to call it again, zero for
// after the next change.
func (s *signer) sync(ctx context.Context, name string) (wait time.Duration, err error) {
	c, err := s.requests.Get(name)
	if apierrors.IsNotFound(err) {
		delete(s.warned, name)
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if len(c.Status.Certificate) > 0 || certificate.Has(c, certificatesv1.CertificateDenied) ||
		certificate.Has(c, certificatesv1.CertificateFailed) {
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, signTimeout)
	defer cancel()
	if certificate.Has(c, certificatesv1.CertificateApproved) {
		return 0, s.sign(ctx, c.DeepCopy())
	}
	if c.Spec.SignerName != certificatesv1.KubeAPIServerClientKubeletSignerName {
		return 0, nil
	}
	return s.approve(ctx, c.DeepCopy())
}

// approve approves the request of a node for itself, and that of a new machine with
// a join token for a name that no node has.
func (s *signer) approve(ctx context.Context, c *certificatesv1.CertificateSigningRequest) (time.Duration, error) {
	request, err := certificate.Parse(c)
	if err != nil {
		return 0, nil //nolint:nilerr // left for users to decide
	}
	node, err := nodeRequest(c, request)
	if err != nil {
		return 0, nil //nolint:nilerr // likewise
	}
	right, message := "nodeclient", "Auto approving node client certificate after SubjectAccessReview."
	if c.Spec.Username == svc.NodeUserPrefix+node && slices.Contains(c.Spec.Groups, user.NodesGroup) {
		right, message = "selfnodeclient", "Auto approving self node client certificate after SubjectAccessReview."
	}
	requester := &user.DefaultInfo{Name: c.Spec.Username, UID: c.Spec.UID, Groups: c.Spec.Groups}
	d, _, err := s.authorizer.Authorize(ctx, authorizer.AttributesRecord{
		User: requester, Verb: "create", APIGroup: certificatesv1.GroupName, APIVersion: "*",
		Resource: "certificatesigningrequests", Subresource: right, ResourceRequest: true,
	})
	if err != nil || d != authorizer.DecisionAllow {
		return noRightWait, err
	}
	if right == "nodeclient" {
		taken, err := s.nameTaken(ctx, c.Name, node)
		if err != nil {
			return 0, err
		}
		if taken {
			if !s.warned[c.Name] {
				s.warned[c.Name] = true
				s.log.Warn("a machine requests the name of an existing node; it gets it when that Node is deleted and its Lease has "+
					"expired; 'kubectl certificate approve' gives it the name at once", "node", node, "request", c.Name)
			}
			return nameInUseWait, nil
		}
		if wait, done, err := s.admitMachine(ctx, c, node); done || wait > 0 || err != nil {
			return wait, err
		}
	}
	c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: reasonAuto, Message: message,
		LastUpdateTime: metav1.Now(),
	})
	_, err = s.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, c.Name, c, metav1.UpdateOptions{})
	return 0, ignoreRace(err)
}

// reasonAuto is the reason of an approval by the server, kube-controller-manager's.
const reasonAuto = "AutoApproved"

// autoApproved reports whether the server has approved c, and no administrator.
func autoApproved(c *certificatesv1.CertificateSigningRequest) bool {
	return slices.ContainsFunc(c.Status.Conditions, func(k certificatesv1.CertificateSigningRequestCondition) bool {
		return k.Type == certificatesv1.CertificateApproved && k.Reason == reasonAuto
	})
}

// tokenOf returns the ID of the token with which a machine made a request; for another user of GroupBootstrappers, a
// name for all requests of this user. It is "" for users of other groups.
func tokenOf(c *certificatesv1.CertificateSigningRequest) string {
	if c.Spec.Username == UserNodeToken {
		return c.Spec.UID
	}
	if id, ok := strings.CutPrefix(c.Spec.Username, bootstrapUserPrefix); ok {
		return id
	}
	if !slices.Contains(c.Spec.Groups, GroupBootstrappers) {
		return ""
	}
	sum := sha256.Sum256([]byte(c.Spec.Username))
	return "user-" + hex.EncodeToString(sum[:4])
}

// admitMachine counts a machine that joins, as soon as the rate allows it. done is set if its request was denied.
func (s *signer) admitMachine(
	ctx context.Context, c *certificatesv1.CertificateSigningRequest, node string,
) (wait time.Duration, done bool, err error) {
	for _, write := range []bool{false, true} {
		usedUp, err := s.count(ctx, c, node, write)
		if err != nil {
			return 0, false, err
		}
		if usedUp != nil {
			return 0, true, s.deny(ctx, c, usedUp)
		}
		if write {
			break
		}
		if ok, err := s.mayJoin(ctx, c.Name); !ok || err != nil {
			return joinWait, false, err
		}
	}
	return 0, false, nil
}

// mayJoin reports whether the machine of a request may join now, by the rate of all servers together. Each of them asks for each
// request, and it counts once.
func (s *signer) mayJoin(ctx context.Context, request string) (bool, error) {
	leases := s.client.CoordinationV1().Leases(metav1.NamespaceSystem)
	l, err := leases.Get(ctx, joinLease, metav1.GetOptions{})
	write := func() (*coordinationv1.Lease, error) { return leases.Update(ctx, l, metav1.UpdateOptions{}) }
	if apierrors.IsNotFound(err) {
		l, err = &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: joinLease}}, nil
		write = func() (*coordinationv1.Lease, error) { return leases.Create(ctx, l, metav1.CreateOptions{}) }
	}
	if err != nil {
		return false, err
	}
	ok, changed := takeJoin(l, request, time.Now())
	if changed {
		_, err = write() // a conflict is tried again
	}
	return ok && err == nil, err
}

// takeJoin reports whether a request may pass, and whether the Lease has changed for that. The Lease's renewTime is when all that
// passed would have passed at one in joinPeriod: it may be ahead of now by joinBurst of these.
func takeJoin(l *coordinationv1.Lease, request string, now time.Time) (ok, changed bool) {
	passed := strings.FieldsFunc(l.Annotations[svc.JoiningAnnotation], func(r rune) bool { return r == ',' })
	if slices.Contains(passed, request) {
		return true, false
	}
	next := now
	if at := l.Spec.RenewTime; at != nil && at.After(now) {
		next = at.Time
	}
	if latest := now.Add(joinBurst * joinPeriod); next.After(latest) { // a clock was set back
		next = latest
	}
	if next = next.Add(joinPeriod); next.Sub(now) > joinBurst*joinPeriod {
		return false, false
	}
	passed = append(passed, request)
	passed = passed[max(0, len(passed)-keptRequests):]
	if l.Annotations == nil {
		l.Annotations = map[string]string{}
	}
	l.Annotations[svc.JoiningAnnotation], l.Spec.RenewTime = strings.Join(passed, ","), &metav1.MicroTime{Time: next}
	return true, true
}

// count counts a machine that joins in the Secret of its token, which it changes only if write is set. usedUp is why
// the token is not valid for the machine.
func (s *signer) count(
	ctx context.Context, c *certificatesv1.CertificateSigningRequest, node string, write bool,
) (usedUp, err error) {
	if c.Spec.Username != UserNodeToken && !strings.HasPrefix(c.Spec.Username, bootstrapUserPrefix) {
		return nil, nil //nolint:nilnil // another credential, which has no number
	}
	secrets := s.client.CoreV1().Secrets(join.SecretNamespace)
	secret, err := secrets.Get(ctx, join.SecretName(tokenOf(c)), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return errors.New("the join token was revoked or has expired since the request"), nil
	}
	if err != nil {
		return nil, err
	}
	changed, usedUp := join.Count(secret, c.Name, node)
	if !changed || !write || usedUp != nil {
		return usedUp, nil
	}
	_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{}) // a conflict is tried again
	return nil, err
}

// deny rejects a request.
func (s *signer) deny(ctx context.Context, c *certificatesv1.CertificateSigningRequest, why error) error {
	c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateDenied, Status: corev1.ConditionTrue, Reason: "TokenUsedUp", Message: why.Error(),
		LastUpdateTime: metav1.Now(),
	})
	_, err := s.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, c.Name, c, metav1.UpdateOptions{})
	return ignoreRace(err)
}

// nodeRequest returns the node that a request is for, or an error if it is not a
// node's request.
func nodeRequest(c *certificatesv1.CertificateSigningRequest, r *x509.CertificateRequest) (string, error) {
	node, ok := strings.CutPrefix(r.Subject.CommonName, svc.NodeUserPrefix)
	if !ok || len(validation.NameIsDNSSubdomain(node, false)) > 0 {
		return "", fmt.Errorf("the common name must be %sNAME", svc.NodeUserPrefix)
	}
	if !slices.Equal(r.Subject.Organization, []string{user.NodesGroup}) {
		return "", fmt.Errorf("the organization must be only %s", user.NodesGroup)
	}
	if len(r.DNSNames)+len(r.EmailAddresses)+len(r.IPAddresses)+len(r.URIs) > 0 {
		return "", errors.New("no alternative names are allowed")
	}
	return node, clientUsages(c)
}

// unreserved returns an error if a request is for an identity of the system: no approval makes a user the
// server, its controllers, a node or an administrator.
func unreserved(r *x509.CertificateRequest) error {
	for _, g := range r.Subject.Organization {
		switch g {
		case user.SystemPrivilegedGroup, user.NodesGroup, svc.ControllersGroup, GroupBootstrappers, groupRequesters:
			return fmt.Errorf("no certificate is signed for the group %s", g)
		}
	}
	name := r.Subject.CommonName
	switch name {
	case svc.ServerUser, svc.ControllersUser, UserNodeToken, certs.UserAdmin, certs.UserServer, user.APIServerUser:
		return fmt.Errorf("no certificate is signed for the user %s", name)
	}
	if strings.HasPrefix(name, svc.NodeUserPrefix) {
		return fmt.Errorf("no certificate of a node is signed by this signer; ask %s", certificatesv1.KubeAPIServerClientKubeletSignerName)
	}
	return nil
}

// clientUsages checks that the usages belong to a client's certificate.
func clientUsages(c *certificatesv1.CertificateSigningRequest) error {
	client := false
	for _, u := range c.Spec.Usages {
		switch u {
		case certificatesv1.UsageClientAuth:
			client = true
		case certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment:
		default:
			return fmt.Errorf("usage %q is not that of a client", u)
		}
	}
	if !client {
		return fmt.Errorf("usage %q is missing", certificatesv1.UsageClientAuth)
	}
	return nil
}

// sign writes the certificate of an approved request, or why it is not signed.
func (s *signer) sign(ctx context.Context, c *certificatesv1.CertificateSigningRequest) error {
	request, err := certificate.Parse(c)
	if err != nil {
		return err
	}
	u := pki.User{Name: request.Subject.CommonName, Groups: request.Subject.Organization}
	switch c.Spec.SignerName {
	case certificatesv1.KubeAPIServerClientKubeletSignerName:
		var node string
		if node, err = nodeRequest(c, request); err == nil {
			if slices.Contains(c.Spec.Groups, groupRequesters) {
				taken, unknown := s.nameTaken(ctx, c.Name, node)
				if unknown != nil {
					return unknown
				}
				if taken {
					err = fmt.Errorf("a machine has joined as %s since this one asked: delete that Node first, or choose another name", node)
					break
				}
			}
			if u.UID, err = s.identity(ctx, c, node); err != nil && !errors.Is(err, errNotStill) {
				return err
			}
		}
	case certificatesv1.KubeAPIServerClientSignerName:
		err = errors.Join(clientUsages(c), unreserved(request))
	default:
		return nil // another signer's
	}
	if err == nil {
		life := time.Duration(0)
		if seconds := c.Spec.ExpirationSeconds; seconds != nil {
			life = time.Duration(*seconds) * time.Second
		}
		c.Status.Certificate, err = s.pki.SignClient(request.PublicKey, u, life)
	}
	if err != nil {
		c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateFailed, Status: corev1.ConditionTrue, Reason: "SignerValidationFailure", Message: err.Error(),
		})
	}
	_, err = s.client.CertificatesV1().CertificateSigningRequests().UpdateStatus(ctx, c, metav1.UpdateOptions{})
	return ignoreRace(err)
}

// ignoreRace returns nil for errors that mean that another writer was faster.
func ignoreRace(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Outdated reports whether a certificate request is removed: a pending one a day after it was made, others an hour
// after they were decided.
func Outdated(c *certificatesv1.CertificateSigningRequest, now time.Time) bool {
	if len(c.Status.Conditions) == 0 {
		return now.Sub(c.CreationTimestamp.Time) > keepPending
	}
	decided := c.CreationTimestamp.Time
	for i := range c.Status.Conditions {
		if at := c.Status.Conditions[i].LastUpdateTime.Time; at.After(decided) {
			decided = at
		}
	}
	return now.Sub(decided) > keepIssued
}

// sweep removes requests some time after they were decided, or if they never were.
func (s *signer) sweep(ctx context.Context) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		all, err := s.requests.List(labels.Everything())
		if err != nil {
			return // cannot happen: the lister reads from memory
		}
		for _, c := range all {
			if !Outdated(c, time.Now()) {
				continue
			}
			bounded, cancel := context.WithTimeout(ctx, signTimeout)
			err := s.client.CertificatesV1().CertificateSigningRequests().Delete(bounded, c.Name, metav1.DeleteOptions{})
			cancel()
			if ignoreRace(err) != nil && ctx.Err() == nil {
				s.log.Warn("cannot delete an old certificate request; retrying", "request", c.Name, "err", err, "after", sweepPeriod)
			}
		}
	}, sweepPeriod)
}
