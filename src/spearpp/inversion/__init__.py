"""Recover the inputs of one Linear layer from its gradient.

Notation used in all modules, for a layer with m neurons, n inputs and a batch of b samples:

- Ĝ = [dℒ/dW dℒ/dβ] and Ŵ = [W β] have one row for each neuron, for the loss ℒ, the weight W and the bias β;
  x̂ = [x; 1] is an input with a 1 for the bias;
- Ĝ = D X̂ᵀ, where column i of D is dℒ/dz for sample i, the **signal** of the sample. With a ReLU, an entry of D is
  zero if the neuron is inactive for the sample;
- Ĝ = L R is the truncated singular value decomposition, with L = U_b and R = Σ_b V_bᵀ;
- a **direction** is a vector q with L q = d_i up to scale, for some sample i. L q is sparse because d_i is;
- a **vertex** is a vector q for which b-1 independent rows of L give zero. Every choice of b-1 rows has one, so a
  vertex is the direction of a sample only if many more entries of L q are zero;
- a **point** is a vector p with x̂ = Rᵀp up to scale. The pre-activations of x̂ are A p with A = Ŵ Rᵀ;
- the **coordinates** of an input are Σ p, so that x̂ = V times its coordinates. The network equations use them.

A **round** in the names of searches (``Stats.rounds``, ``Progress.rounds``) is one pass of a search. ``Problem.rounds``
and the argument ``rounds`` of ``invert`` count rounds of federated learning. ``batch_size`` is the rank of the
gradient, the number of samples that the gradient shows. The argument of ``invert`` sets this rank where the singular
values do not show it clearly.

Modules, in the order in which one layer passes through them:

========================  ==========================================================================================
``observation``           check the tensors and append the bias
``factors``               factor the gradient, read the batch size off its singular values, estimate the noise
``tolerance``             decide which numbers count as zero, given the noise
``problem``               all of the above in one object, which every search takes
``next_layer``            read the gradient of the next layer, if it is given
``network``               the equations of the whole network, for any activation (``chain``, ``spans``)
``levels``                how noisy inputs and moving weights disturb these equations
``residuals``             these equations for many points at once; ``tangents`` has their derivatives
``loop``                  run a search from ``spearpp.search``, collect the directions that it proposes, and assemble
                          the inputs
``pool``, ``selection``   keep sparse directions, and select the b that belong together
``matches``               inputs that the next layer determines one by one
``solutions``             inputs that single rows of the gradient, or the network equations, determine one by one
``evidence``              certify recovered inputs without ground truth
``result``                the result of an inversion
``local_fit``             after local training: all samples fitted by repeating the training (``training``)
``invert``                the public function
``pixels``                after the inversion: pictures from the features that a front end computed
========================  ==========================================================================================
"""
