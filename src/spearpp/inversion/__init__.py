"""Recover the inputs of one Linear layer from its gradient.

Notation used in all modules, for a layer with m neurons, n inputs and a batch of b samples:

- Ĝ = [dℒ/dW dℒ/dβ] and Ŵ = [W β] have one row for each neuron, for the loss ℒ, the weight W and the bias β;
  x̂ = [x; 1] is an input with a 1 for the bias;
- Ĝ = D X̂ᵀ, where column i of D is dℒ/dz for sample i, the **signal** of the sample. Behind a ReLU, an entry of D is
  zero if the neuron is inactive for the sample;
- Ĝ = L R is the truncated singular value decomposition, with L = U_b and R = Σ_b V_bᵀ;
- a **direction** is a vector q with L q = d_i up to scale, for some sample i. L q is sparse because d_i is;
- a **vertex** is a direction for which b-1 rows of L q are zero. Every choice of b-1 rows has one, right or wrong;
- a **point** is a vector p with x̂ = Rᵀp up to scale. The pre-activations of x̂ are A p with A = Ŵ Rᵀ.

Modules, in the order in which one layer passes through them:

========================  ==========================================================================================
``observation``           check the tensors and append the bias
``factors``               factor the gradient, read the batch size off its singular values, estimate the noise
``tolerance``             decide which numbers count as zero, given the noise
``problem``               all of the above in one object, which every search takes
``next_layer``            read the gradient of the next layer, if it is given
``loop``                  run a search from ``spearpp.search`` and collect the directions that it proposes
``pool``, ``selection``   keep sparse directions, and select the b that belong together
``matches``, ``pairs``    inputs that the next layer, or single rows of the gradient, determine one by one
``evidence``              certify recovered inputs without ground truth
``assemble``, ``result``  put the result together
``invert``, ``many``      the public functions for one layer and for many layers
========================  ==========================================================================================
"""
