package apiserver

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/certificates/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/registry/certificate"
)

// Times of the signer. Requests are kept a while for people to look at.
const (
	signTimeout  = 30 * time.Second
	keepIssued   = time.Hour
	keepPending  = 24 * time.Hour
	sweepPeriod  = 10 * time.Minute
	nameHeldWait = time.Second
)

// signer approves the certificate requests of nodes and signs what is
// approved for the two signers of clients of this server.
type signer struct {
	client     kubernetes.Interface
	requests   listers.CertificateSigningRequestLister
	informer   cache.SharedIndexInformer
	authorizer authorizer.UnconditionalAuthorizer
	pki        *pki.Directory
	log        *slog.Logger
}

func newSigner(client kubernetes.Interface, f informers.SharedInformerFactory, a authorizer.UnconditionalAuthorizer, p *pki.Directory,
	log *slog.Logger) *signer {
	i := f.Certificates().V1().CertificateSigningRequests()
	return &signer{client: client, requests: i.Lister(), informer: i.Informer(), authorizer: a, pki: p, log: log}
}

// run works until ctx ends.
func (s *signer) run(ctx context.Context) {
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](20*time.Millisecond,
		30*time.Second))
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
				s.log.Debug("will look at a certificate request again", "name", name, "err", err)
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

// sync takes a request one step on; wait is when to look again, zero for when
// it changes.
func (s *signer) sync(ctx context.Context, name string) (wait time.Duration, err error) {
	c, err := s.requests.Get(name)
	if apierrors.IsNotFound(err) {
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

// approve approves what a node asks for itself, and what a new machine with a
// join token asks for a node that is not there already.
func (s *signer) approve(ctx context.Context, c *certificatesv1.CertificateSigningRequest) (time.Duration, error) {
	request, err := certificate.Parse(c)
	if err != nil {
		return 0, nil //nolint:nilerr // nothing to approve; people may look at it
	}
	node, err := nodeRequest(c, request)
	if err != nil {
		return 0, nil //nolint:nilerr // likewise
	}
	right, message := "nodeclient", "Auto approving node client certificate after SubjectAccessReview."
	if c.Spec.Username == nodePrefix+node && slices.Contains(c.Spec.Groups, user.NodesGroup) {
		right, message = "selfnodeclient", "Auto approving self node client certificate after SubjectAccessReview."
	}
	asker := &user.DefaultInfo{Name: c.Spec.Username, UID: c.Spec.UID, Groups: c.Spec.Groups}
	d, _, err := s.authorizer.Authorize(ctx, authorizer.AttributesRecord{
		User: asker, Verb: "create", APIGroup: certificatesv1.GroupName, APIVersion: "*",
		Resource: "certificatesigningrequests", Subresource: right, ResourceRequest: true,
	})
	if err != nil || d != authorizer.DecisionAllow {
		return 0, err
	}
	if right == "nodeclient" {
		held, err := s.nameHeld(ctx, node)
		if err != nil {
			return 0, err
		}
		if held {
			s.log.Warn("a machine asks to join under the name of a node that is alive; it has to wait until that one has ended, or take "+
				"another name",
				"node", node, "request", c.Name)
			return nameHeldWait, nil
		}
	}
	c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "AutoApproved", Message: message,
	})
	_, err = s.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, c.Name, c, metav1.UpdateOptions{})
	return 0, ignoreRace(err)
}

// nameHeld says whether a node of that name renews its Lease: who has a join
// token must not take the place of a node that lives.
func (s *signer) nameHeld(ctx context.Context, node string) (bool, error) {
	lease, err := s.client.CoordinationV1().Leases(leaseNamespace).Get(ctx, node, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil || lease.Spec.RenewTime == nil || lease.Spec.LeaseDurationSeconds == nil {
		return false, err
	}
	return time.Now().Before(lease.Spec.RenewTime.Add(time.Duration(*lease.Spec.LeaseDurationSeconds) * time.Second)), nil
}

// nodeRequest returns the node that a request is for, or why it is not the
// request of a node.
func nodeRequest(c *certificatesv1.CertificateSigningRequest, r *x509.CertificateRequest) (string, error) {
	node, ok := strings.CutPrefix(r.Subject.CommonName, nodePrefix)
	if !ok || len(validation.NameIsDNSSubdomain(node, false)) > 0 {
		return "", fmt.Errorf("the common name must be %sNAME", nodePrefix)
	}
	if !slices.Equal(r.Subject.Organization, []string{user.NodesGroup}) {
		return "", fmt.Errorf("the organization must be %s alone", user.NodesGroup)
	}
	if len(r.DNSNames)+len(r.EmailAddresses)+len(r.IPAddresses)+len(r.URIs) > 0 {
		return "", errors.New("no alternative names are allowed")
	}
	return node, clientUsages(c)
}

// clientUsages wants the usages of a client's certificate and no others.
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

// sign writes the certificate of an approved request, or why there is none.
func (s *signer) sign(ctx context.Context, c *certificatesv1.CertificateSigningRequest) error {
	request, err := certificate.Parse(c)
	if err != nil {
		return err
	}
	switch c.Spec.SignerName {
	case certificatesv1.KubeAPIServerClientKubeletSignerName:
		_, err = nodeRequest(c, request)
	case certificatesv1.KubeAPIServerClientSignerName:
		err = clientUsages(c)
		if slices.Contains(request.Subject.Organization, user.SystemPrivilegedGroup) {
			err = fmt.Errorf("no certificate is signed for the group %s", user.SystemPrivilegedGroup)
		}
	default:
		return nil // somebody else signs it
	}
	if err == nil {
		life := time.Duration(0)
		if seconds := c.Spec.ExpirationSeconds; seconds != nil {
			life = time.Duration(*seconds) * time.Second
		}
		c.Status.Certificate, err = s.pki.SignClient(request.PublicKey, request.Subject.CommonName, request.Subject.Organization, life)
	}
	if err != nil {
		c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateFailed, Status: corev1.ConditionTrue, Reason: "SignerValidationFailure", Message: err.Error(),
		})
	}
	_, err = s.client.CertificatesV1().CertificateSigningRequests().UpdateStatus(ctx, c, metav1.UpdateOptions{})
	return ignoreRace(err)
}

// ignoreRace takes it that another server, or somebody else, was faster.
func ignoreRace(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// sweep removes requests that are done with, or that nobody decided.
func (s *signer) sweep(ctx context.Context) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		all, err := s.requests.List(labels.Everything())
		if err != nil {
			return // a lister of memory does not fail
		}
		for _, c := range all {
			keep := keepPending
			if len(c.Status.Conditions) > 0 {
				keep = keepIssued
			}
			if time.Since(c.CreationTimestamp.Time) < keep {
				continue
			}
			bounded, cancel := context.WithTimeout(ctx, signTimeout)
			err := s.client.CertificatesV1().CertificateSigningRequests().Delete(bounded, c.Name, metav1.DeleteOptions{})
			cancel()
			if ignoreRace(err) != nil && ctx.Err() == nil {
				s.log.Warn("cannot remove an old certificate request", "name", c.Name, "err", err)
			}
		}
	}, sweepPeriod)
}
