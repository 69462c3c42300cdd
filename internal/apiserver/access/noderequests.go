package access

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/certificates/v1"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/registry/certificate"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// groupRequesters is the group of users with a token of 'fairlead token create --needs-approval', and
	// requesterPrefix begins their names, which end with the token's ID.
	groupRequesters = "system:fairlead-node-requesters"
	requesterPrefix = "system:node-request:"

	// maxPendingOfToken and maxPending bound the requests of such tokens that are undecided.
	maxPendingOfToken = 40
	maxPending        = 120
	// informedWithin is the time after which the lister has a request that was created.
	informedWithin = 10 * time.Second
)

// requesterWith returns the user with the token of an ID.
func requesterWith(id string) user.Info {
	return &user.DefaultInfo{Name: requesterPrefix + id, UID: id, Groups: []string{groupRequesters}}
}

// requesterOf returns the ID of a requester's token.
func requesterOf(u user.Info) (id string, ok bool) {
	id, ok = strings.CutPrefix(u.GetName(), requesterPrefix)
	return id, ok && slices.Contains(u.GetGroups(), groupRequesters)
}

// authorizeRequester lets a user with a token that needs approval create requests and get the requests of this
// token. It denies everything else, whatever roles all users have.
func authorizeRequester(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if !slices.Contains(a.GetUser().GetGroups(), groupRequesters) {
		return authorizer.DecisionNoOpinion, "", nil
	}
	id, ok := requesterOf(a.GetUser())
	if ok && a.IsResourceRequest() && a.GetAPIGroup() == groupCertificates && a.GetResource() == "certificatesigningrequests" &&
		a.GetSubresource() == "" && (a.GetVerb() == "create" || a.GetVerb() == "get" && strings.HasPrefix(a.GetName(), join.RequestsOf(id))) {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionDeny, "this join token may request the certificate of a node and get its own requests, nothing else", nil
}

// nodeRequests checks the certificate requests of machines that join as nodes.
type nodeRequests struct {
	*admission.Handler
	client   kubernetes.Interface
	requests listers.CertificateSigningRequestLister

	mu sync.Mutex
	// known has the nodes that requesters asked for, by the names of their requests: the requests of the lister,
	// and newer ones.
	known map[string]nodeAsked
}

// nodeAsked is for which node a user asked, and when this server saw that.
type nodeAsked struct {
	user, node string
	at         time.Time
}

func newNodeRequests(client kubernetes.Interface, f informers.SharedInformerFactory) *nodeRequests {
	return &nodeRequests{
		Handler: admission.NewHandler(admission.Create), client: client,
		requests: f.Certificates().V1().CertificateSigningRequests().Lister(), known: map[string]nodeAsked{},
	}
}

var _ admission.ValidationInterface = (*nodeRequests)(nil)

// Validate rejects what a requester creates unless it is the request for a node that does not exist, and few
// requests are pending. It accepts all requests of others.
func (r *nodeRequests) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	id, ok := requesterOf(a.GetUserInfo())
	c, is := a.GetObject().(*certificatesv1.CertificateSigningRequest)
	if !ok || !is {
		return nil
	}
	node, err := requestedNode(id, c)
	if err != nil {
		return admission.NewForbidden(a, err)
	}
	taken, err := r.nameTaken(ctx, c.Name, node)
	if err != nil {
		return err
	}
	if taken {
		return apierrors.NewConflict(certificatesv1.Resource("certificatesigningrequests"), c.Name,
			fmt.Errorf("there is a node %s: delete that Node if its machine is gone, or choose another name with --node-name", node))
	}
	return r.reserve(c.Name, nodeAsked{a.GetUserInfo().GetName(), node, time.Now()}, a.IsDryRun())
}

// requestedNode returns the node that the request of a token is for.
func requestedNode(id string, c *certificatesv1.CertificateSigningRequest) (string, error) {
	if c.Spec.SignerName != certificatesv1.KubeAPIServerClientKubeletSignerName {
		return "", fmt.Errorf("the signer must be %s", certificatesv1.KubeAPIServerClientKubeletSignerName)
	}
	request, err := certificate.Parse(c)
	if err != nil {
		return "", err
	}
	node, err := nodeRequest(c, request)
	if err != nil {
		return "", err
	}
	name, err := join.RequestName(id, node, request.PublicKey)
	if err == nil && c.Name != name {
		err = errors.New("the name is not that of a request for this key and node")
	}
	return node, err
}

// reserve makes room for a request among the pending ones. A name is requested once at a time, so
// that an administrator approves one machine.
func (r *nodeRequests) reserve(name string, asked nodeAsked, dryRun bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	all, err := r.requests.List(labels.Everything())
	if err != nil {
		return err
	}
	pending := map[string]bool{} // of the listed requests
	for _, c := range all {
		if !slices.Contains(c.Spec.Groups, groupRequesters) {
			continue
		}
		pending[c.Name] = len(c.Status.Conditions) == 0
		if _, ok := r.known[c.Name]; ok {
			continue
		}
		if request, err := certificate.Parse(c); err == nil {
			r.known[c.Name] = nodeAsked{c.Spec.Username, strings.TrimPrefix(request.Subject.CommonName, svc.NodeUserPrefix), asked.at}
		}
	}
	own, total := 0, 0
	for other, k := range r.known {
		undecided, listed := pending[other]
		switch {
		case !listed && asked.at.Sub(k.at) > informedWithin:
			delete(r.known, other)
			continue
		case listed && !undecided, other == name: // the storage answers that it exists
			continue
		case k.node == asked.node:
			return apierrors.NewConflict(certificatesv1.Resource("certificatesigningrequests"), name,
				fmt.Errorf("the request %s for node %s is pending: deny or delete it, or choose another name with --node-name", other, k.node))
		case k.user == asked.user:
			own++
		}
		total++
	}
	if own >= maxPendingOfToken || total >= maxPending {
		return apierrors.NewTooManyRequests(fmt.Sprintf("%d requests of this join token, and %d in all, are pending: "+
			"approve or deny some ('kubectl get csr')", own, total), 0)
	}
	if !dryRun {
		r.known[name] = asked
	}
	return nil
}

// nameTaken reports whether a node has that name, or another request for it was approved a moment ago.
func (r *nodeRequests) nameTaken(ctx context.Context, request, node string) (bool, error) {
	inUse, err := r.nameInUse(ctx, node)
	return inUse || err == nil && r.justIssued(request, node), err
}

// nameInUse reports whether a node has that name: its Node has been registered and
// not deleted, or its Lease is renewed. The holder of a join token must not replace
// it, dead or alive.
func (r *nodeRequests) nameInUse(ctx context.Context, node string) (bool, error) {
	n, err := r.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err == nil && registered(n) || err != nil && !apierrors.IsNotFound(err) {
		return err == nil, err
	}
	lease, err := r.client.CoordinationV1().Leases(leaseNamespace).Get(ctx, node, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil || lease.Spec.RenewTime == nil || lease.Spec.LeaseDurationSeconds == nil {
		return false, err
	}
	return time.Now().Before(lease.Spec.RenewTime.Add(time.Duration(*lease.Spec.LeaseDurationSeconds) * time.Second)), nil
}

// justIssued reports whether another request for the node was approved a moment ago:
// its machine may not have written its Lease yet.
func (r *nodeRequests) justIssued(request, node string) bool {
	all, err := r.requests.List(labels.Everything())
	if err != nil {
		return true // cannot happen: the lister reads from memory
	}
	return slices.ContainsFunc(all, func(c *certificatesv1.CertificateSigningRequest) bool {
		i := slices.IndexFunc(c.Status.Conditions, func(k certificatesv1.CertificateSigningRequestCondition) bool {
			return k.Type == certificatesv1.CertificateApproved && time.Since(k.LastUpdateTime.Time) < registerWithin
		})
		if i < 0 || c.Name == request || c.Spec.SignerName != certificatesv1.KubeAPIServerClientKubeletSignerName {
			return false
		}
		request, err := certificate.Parse(c)
		return err == nil && request.Subject.CommonName == svc.NodeUserPrefix+node
	})
}
