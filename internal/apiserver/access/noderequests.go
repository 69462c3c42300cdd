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
	// maxRequestsBeside is how many requests a join token may have beside its nodes' own, whatever became of them,
	// and how many a node may have beside its renewals.
	maxRequestsBeside = 40
	// maxRequestSize bounds the requests of machines and nodes, in bytes of its object. A usual one has 700.
	maxRequestSize = 16 << 10
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
	life     func() time.Duration // of certificates, at most
	requests listers.CertificateSigningRequestLister

	mu sync.Mutex
	// known has the nodes that were asked for, by the names of the requests: the requests of the lister,
	// and newer ones.
	known map[string]nodeAsked
}

// nodeAsked is for which node a user asked, and when this server saw that.
type nodeAsked struct {
	user, node string
	at         time.Time
	// byApproval is set for requesters.
	byApproval bool
}

// askedBy returns the user and the UID of a request, by which it is counted: all join tokens have one user.
func askedBy(name, uid string) string { return name + "/" + uid }

func newNodeRequests(client kubernetes.Interface, f informers.SharedInformerFactory, life func() time.Duration) *nodeRequests {
	return &nodeRequests{
		Handler: admission.NewHandler(admission.Create), client: client, life: life,
		requests: f.Certificates().V1().CertificateSigningRequests().Lister(), known: map[string]nodeAsked{},
	}
}

var _ admission.ValidationInterface = (*nodeRequests)(nil)

// Validate rejects what a requester creates unless it is the request for a node that does not exist, and few
// requests are pending. It bounds the size and the number of the requests of join tokens and nodes, and accepts all
// requests of others.
func (r *nodeRequests) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	c, is := a.GetObject().(*certificatesv1.CertificateSigningRequest)
	if !is || !machine(a.GetUserInfo().GetGroups()) {
		return nil
	}
	if size := c.Size(); size > maxRequestSize {
		return apierrors.NewRequestEntityTooLargeError(fmt.Sprintf(
			"the certificate request of a machine has %d bytes, at most %d are allowed", size, maxRequestSize))
	}
	id, ok := requesterOf(a.GetUserInfo())
	if !ok {
		return r.checkCounted(ctx, a, c)
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
	return r.reserve(c.Name, nodeAsked{askedBy(a.GetUserInfo().GetName(), a.GetUserInfo().GetUID()), node, time.Now(), true}, 0, a.IsDryRun())
}

// machine reports whether a user of these groups is a node, or a machine that joins.
func machine(groups []string) bool {
	return slices.ContainsFunc(groups, func(g string) bool {
		return g == groupRequesters || g == GroupBootstrappers || g == user.NodesGroup
	})
}

// checkCounted checks a request of a node or of a machine with a token that needs no approval.
func (r *nodeRequests) checkCounted(ctx context.Context, a admission.Attributes, c *certificatesv1.CertificateSigningRequest) error {
	u := a.GetUserInfo()
	if u.GetName() == UserNodeToken && c.Spec.SignerName != certificatesv1.KubeAPIServerClientKubeletSignerName {
		return admission.NewForbidden(a, fmt.Errorf("a join token is for certificates of nodes: the signer must be %s",
			certificatesv1.KubeAPIServerClientKubeletSignerName))
	}
	limit := maxRequestsBeside
	if slices.Contains(u.GetGroups(), user.NodesGroup) {
		limit += 4 * int(keepIssued/r.life()) // renewals are at two thirds of a certificate's life
	} else if l, err := r.token(ctx, u); err != nil {
		return err
	} else if err := l.UsedUp(); l.ID != "" && err != nil {
		return admission.NewForbidden(a, err)
	} else {
		limit += l.Nodes
	}
	return r.reserve(c.Name, nodeAsked{user: askedBy(u.GetName(), u.GetUID()), at: time.Now()}, limit, a.IsDryRun())
}

// token returns the token of a machine that joins, the zero value if it has another credential.
func (r *nodeRequests) token(ctx context.Context, u user.Info) (join.Listed, error) {
	id := u.GetUID()
	if u.GetName() != UserNodeToken {
		var ok bool
		if id, ok = strings.CutPrefix(u.GetName(), bootstrapUserPrefix); !ok {
			return join.Listed{}, nil
		}
	}
	s, err := r.client.CoreV1().Secrets(join.SecretNamespace).Get(ctx, join.SecretName(id), metav1.GetOptions{})
	if err != nil {
		return join.Listed{}, err
	}
	return join.List(s)
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

// reserve makes room for a request. By approval, that is among the pending ones, and a name is requested once at a time, so
// that an administrator approves one machine; else limit is how many requests of the user there may be.
func (r *nodeRequests) reserve(name string, asked nodeAsked, limit int, dryRun bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	all, err := r.requests.List(labels.Everything())
	if err != nil {
		return err
	}
	pending := map[string]bool{} // of the listed requests
	for _, c := range all {
		if !machine(c.Spec.Groups) {
			continue
		}
		pending[c.Name] = len(c.Status.Conditions) == 0
		if _, ok := r.known[c.Name]; ok {
			continue
		}
		if request, err := certificate.Parse(c); err == nil {
			node := strings.TrimPrefix(request.Subject.CommonName, svc.NodeUserPrefix)
			r.known[c.Name] = nodeAsked{askedBy(c.Spec.Username, c.Spec.UID), node, asked.at, slices.Contains(c.Spec.Groups, groupRequesters)}
		}
	}
	own, total, ever := 0, 0, 0
	for other, k := range r.known {
		undecided, listed := pending[other]
		switch {
		case !listed && asked.at.Sub(k.at) > informedWithin:
			delete(r.known, other)
			continue
		case other == name: // the storage answers that it exists
			continue
		case k.user == asked.user:
			ever++
		}
		switch {
		case listed && !undecided, !k.byApproval || !asked.byApproval:
			continue
		case k.node == asked.node:
			return apierrors.NewConflict(certificatesv1.Resource("certificatesigningrequests"), name,
				fmt.Errorf("the request %s for node %s is pending: deny or delete it, or choose another name with --node-name", other, k.node))
		case k.user == asked.user:
			own++
		}
		total++
	}
	if !asked.byApproval && ever >= limit {
		return apierrors.NewTooManyRequests(fmt.Sprintf("%d requests of %s are kept, at most %d may be: delete some ('kubectl get csr'), "+
			"or wait; they go an hour after they were decided", ever, asked.user, limit), 0)
	}
	if asked.byApproval && (own >= maxPendingOfToken || total >= maxPending) {
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
