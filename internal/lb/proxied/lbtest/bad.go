package lbtest

import (
	"crypto"
	"io"
	"net"
	"strings"
)

// BadSigner is a key with which a handshake panics.
type BadSigner struct{ crypto.Signer }

// Sign panics.
func (BadSigner) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { panic("of the key") }

// BadStream panics where a text has been read.
type BadStream struct {
	*net.TCPConn
	// At is the text.
	At string
}

// Read panics when the text is in what it has read.
func (b BadStream) Read(p []byte) (int, error) {
	n, err := b.TCPConn.Read(p)
	if strings.Contains(string(p[:n]), b.At) {
		panic("of the stream")
	}
	return n, err
}
