package join

import (
	"context"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base32"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	certificatesclient "k8s.io/client-go/kubernetes/typed/certificates/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/keyutil"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

const (
	// DefaultApprovalTimeout is how long a node waits for an administrator unless another time is asked for.
	DefaultApprovalTimeout = time.Hour
	// maxApprovalPoll is the longest pause between two looks at a request.
	maxApprovalPoll = 2 * time.Second
	// requestPrefix begins the names of the requests of nodes, as requests of kubelets.
	requestPrefix = "node-csr-"
)

// RequestsOf returns how the names of all requests with the token of an ID begin.
func RequestsOf(id string) string { return requestPrefix + id + "-" }

// RequestName returns the name of the request with the token of an ID for the certificate of a node.
// Who does not have the public key cannot guess it; who has, finds the request again.
func RequestName(id, node string, public crypto.PublicKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(append(der, node...))
	return RequestsOf(id) + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:]))[:32], nil
}

// NewApprovedNode is NewNode with a token that needs an administrator's approval, for which it waits no
// longer than within. The request's key stays in dir until then, so that a later call goes on with the
// same request.
func NewApprovedNode(
	ctx context.Context, boot *rest.Config, name, dir string, within time.Duration, log *slog.Logger,
) (*Node, error) {
	return newNode(boot, name, dir, log, func(n *Node) error {
		if err := n.ask(ctx, boot, within); err != nil {
			return fmt.Errorf("no certificate for node %s: %w", name, err)
		}
		return nil
	})
}

// ask requests the node's certificate and keeps it when the request is approved.
func (n *Node) ask(ctx context.Context, boot *rest.Config, within time.Duration) error {
	token, err := Parse(boot.BearerToken)
	if err != nil {
		return err
	}
	key, keyPEM, err := n.requestKey()
	if err != nil {
		return err
	}
	request := &certificatesv1.CertificateSigningRequest{}
	if request.Name, err = RequestName(token.ID, n.name, key.Public()); err != nil {
		return err
	}
	if request.Spec, err = n.spec(key); err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(boot)
	if err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	cert, err := n.approved(waiting, client.CertificatesV1().CertificateSigningRequests(), request)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, errNotRequested):
		return fmt.Errorf("the API server has not taken the request %s within %s (%w): start the agent again when it answers",
			request.Name, within, err)
	case err != nil && waiting.Err() != nil:
		return fmt.Errorf("the request %s was not approved within %s (%w): approve it with 'kubectl certificate approve %[1]s', "+
			"and start the agent again, which goes on with it", request.Name, within, err)
	case err != nil:
		return err
	}
	if err := n.keep(cert, keyPEM); err != nil {
		return err
	}
	return os.Remove(n.file(requestKeyFile))
}

// errNotRequested is the error of a request of which it is not known that the API server has it.
var errNotRequested = errors.New("no answer")

// requestKeyFile has the key of a request that waits, from which the request's name follows.
const requestKeyFile = "request.key"

// requestKey returns the key of this machine's request, which it makes for the first one.
func (n *Node) requestKey() (key crypto.Signer, keyPEM []byte, err error) {
	keyPEM, err = os.ReadFile(n.file(requestKeyFile))
	if errors.Is(err, fs.ErrNotExist) {
		if key, keyPEM, err = pki.NewKey(); err != nil {
			return nil, nil, err
		}
		return key, keyPEM, fileio.Replace(n.file(requestKeyFile), keyPEM, 0o600)
	}
	if err != nil {
		return nil, nil, err
	}
	parsed, err := keyutil.ParsePrivateKeyPEM(keyPEM)
	key, ok := parsed.(crypto.Signer)
	if err != nil || !ok {
		return nil, nil, fmt.Errorf("%s is no private key (%w): remove it to make another request", n.file(requestKeyFile), err)
	}
	return key, keyPEM, nil
}

// approved returns the certificate of a request, which it creates if there is none.
func (n *Node) approved(
	ctx context.Context, api certificatesclient.CertificateSigningRequestInterface, request *certificatesv1.CertificateSigningRequest,
) ([]byte, error) {
	var seen bool
	var last error
	unauthorized := time.Now()
	for pause := issuePoll; ; pause = min(pause*3/2, maxApprovalPoll) {
		c, err := api.Get(ctx, request.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			if seen {
				return nil, fmt.Errorf("the request %s was deleted", request.Name)
			}
			c, err = api.Create(ctx, request, metav1.CreateOptions{})
		}
		if !apierrors.IsUnauthorized(err) {
			unauthorized = time.Now()
		}
		switch {
		case err == nil:
			if !seen {
				n.log.Warn("waiting for an administrator to approve this node's request: 'kubectl get csr' shows it",
					"node", n.name, "request", request.Name, "approve", "kubectl certificate approve "+request.Name)
			}
			seen, last = true, nil
			if err := rejected(c); err != nil || len(c.Status.Certificate) > 0 {
				return c.Status.Certificate, err
			}
		case apierrors.IsForbidden(err) || apierrors.IsInvalid(err):
			return nil, err
		case time.Since(unauthorized) > startTimeout:
			return nil, fmt.Errorf("%w: the token has expired or was revoked; make one with 'fairlead token create --needs-approval'", err)
		case ctx.Err() == nil:
			if last == nil || last.Error() != err.Error() {
				n.log.Warn("cannot request this node's certificate; retrying", "request", request.Name, "err", err)
			}
			last = err
		}
		select {
		case <-ctx.Done():
			switch {
			case !seen && last != nil:
				return nil, fmt.Errorf("%w: %w", errNotRequested, last)
			case !seen:
				return nil, errNotRequested
			case last != nil:
				return nil, last
			}
			return nil, errors.New("it waits for approval")
		case <-time.After(pause):
		}
	}
}
